"""Model runner: what an engine computes on the device, in batches of few shapes."""
