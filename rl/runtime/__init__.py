"""Runtimes: where the roles of an experiment live. The roles themselves do not know."""
