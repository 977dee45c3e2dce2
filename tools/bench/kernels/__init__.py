"""Kernels: workloads by several implementations, and block sizes of paged attention, timed on a TPU."""
