"""Kernels: workloads by several implementations."""
