"""Kernels for TPUs in which the order of a row's sums does not depend on the other rows of the batch."""
