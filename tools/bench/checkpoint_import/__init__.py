"""Benchmark of importing checkpoints."""
