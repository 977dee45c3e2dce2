"""Interleaved measurement of worker processes: their protocol, and the circumstances of a run."""
