"""Benchmark of verifiers and the sandbox."""
