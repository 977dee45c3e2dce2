"""`axl doctor`: what this machine is, and whether the stack works on it."""
