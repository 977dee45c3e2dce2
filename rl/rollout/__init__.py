"""Rollouts: the generation engine and the role that runs it."""
