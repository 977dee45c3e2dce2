"""Ways to move a gigabyte from one process to another on one machine, interleaved in one run.

python -m tools.bench.transports --json
"""
