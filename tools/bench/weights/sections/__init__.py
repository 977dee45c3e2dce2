"""Measurements of the parameter server: one module for each section of `axl bench weights`.

Each has `measure(quick) -> dict`, whose keys become keys of the benchmark's result. Each runs in a process of its own,
which starts the processes of the roles (`role.py`).
"""

SECTIONS = {
    "moving": "push and pull of a gigabyte, by turns with a raw stream and a copy in memory",
    "reshard": "bytes read by the bytes needed, from one sharding to another",
    "fan_out": "eight workers, who serve each other, against eight that ask the server",
    "pause": "how long a change of weights keeps the engine from drawing, while versions come in beside it",
    "delta": "bytes and CPU seconds of lossless deltas on the steps of an RL run",
}
