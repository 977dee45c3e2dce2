"""Peers that a benchmark compares with, each run by its own packages in its own environment."""
