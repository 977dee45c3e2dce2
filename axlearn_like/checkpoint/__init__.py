"""Checkpoints: asynchronous, verified by checksum, in tiers (newest, best, remote), converted by name."""
