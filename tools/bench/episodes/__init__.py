"""Benchmark of episodes with tools."""
