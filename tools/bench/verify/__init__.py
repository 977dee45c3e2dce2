"""Attacks on the sandbox of a machine."""
