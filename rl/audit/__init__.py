"""Checks and summaries of a run from what it has written."""
