"""Ways to get a gigabyte from one process to another on one machine, measured by turns.

python -m tools.bench.transports --json
"""
