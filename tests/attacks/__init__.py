"""Attacks of strangers on real commands, server and job; `python -m tests.attacks` tries all and writes the table."""
