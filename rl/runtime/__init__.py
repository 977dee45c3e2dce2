"""Runtimes: they decide in which process each role of an experiment runs. The roles do not know."""
