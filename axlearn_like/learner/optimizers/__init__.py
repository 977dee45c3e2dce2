"""Optimizers: update directions as optax transformations."""
