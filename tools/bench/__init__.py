"""Benchmarks: each runs our stack and, on request, peers on the same job in one run."""
