"""Devices of a Ray cluster: what it has, and what a run reserves."""
