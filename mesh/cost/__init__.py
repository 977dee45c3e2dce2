"""Cost model: memory, communication and time of a compiled program, without a device to run it."""
