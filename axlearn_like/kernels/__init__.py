"""Kernels: Pallas programs for accelerators, each behind an interface of this project."""
