"""Benchmarks: each runs our stack and, when asked, peers on the same job in one run."""
