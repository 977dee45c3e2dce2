"""Benchmark of episodes: tools beside a loop that waits, tools that start while they are called, plans in parallel."""
