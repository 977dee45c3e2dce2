"""Scheduling: which sequences run next, how requests begin and end, and the dispatches in which they draw tokens."""
