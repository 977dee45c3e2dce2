"""The kernels: values against float64 in simulation, and what the TPU compiler plans for them."""
