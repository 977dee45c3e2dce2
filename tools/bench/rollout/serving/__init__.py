"""Load on a real server: cold starts, worst passes, first tokens."""
