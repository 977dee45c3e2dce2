"""LDPC decoding as a workload of the bench of kernels: one decoder for numpy, XLA and Pallas, to the bit."""
