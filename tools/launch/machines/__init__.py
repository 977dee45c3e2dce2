"""Machines that are asked for: TPU slices as platforms name them, terms of capacity, storage that all see."""
