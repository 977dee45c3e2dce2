"""Launching: how fast a run is planned, begins, and comes back after the loss of a machine."""
