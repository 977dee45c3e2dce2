"""Zebra parallelism: attention on one group of devices, experts on another, in one update."""
