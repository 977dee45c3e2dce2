"""RL on one task each: a tool to call, queries to write."""
