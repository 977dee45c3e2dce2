"""Benchmarks that prove what this project says of itself; `axl bench NAME` runs them in a checkout."""
