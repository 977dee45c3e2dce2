"""Processes of one machine of a Ray cluster that we start: no more than place and hold actors."""
