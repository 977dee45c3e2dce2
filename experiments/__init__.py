"""Experiments: modules of functions that compose configs, found by name through the registry."""
