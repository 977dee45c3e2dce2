"""Attention kernels: the interface, the choice among them, and one file for each."""
