"""Kernels for TPUs whose matrices are two factors: feed-forward networks, and attention over a cache in rank space."""
