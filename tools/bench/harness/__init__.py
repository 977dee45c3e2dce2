"""Measuring workers in turns: the protocol they speak, and the circumstances of a run."""
