"""Ray's object store: `ray.put` of an array in the driver, `ray.get` in an actor that looks at every byte.

    python -m tools.bench.transports.ray_store WAY NBYTES OPTIONS

CPU seconds are those of the driver, the actor and Ray's own processes in the same time.
"""

import json
import logging
import os
import sys
import time
from typing import Any

import numpy as np
import psutil
import ray

from tools.bench.transports.receiving import read_once
from tools.bench.transports.yardsticks import payload


@ray.remote
class Reader:
    """The receiving process."""

    def look(self, references: list[ray.ObjectRef]) -> tuple[int, float]:
        """Return the combined words of the array, and the CPU seconds used."""
        began = time.process_time()
        array = ray.get(references[0])
        return read_once(array), time.process_time() - began


def measure(nbytes: int) -> dict[str, float]:
    """Measure this way, as `receiving.measure` does."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=int(nbytes * 2.5) + (100 << 20),
        _node_ip_address="127.0.0.1",
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    source = payload(nbytes)
    reader: Any = Reader.remote()
    expected = read_once(source)
    ray.get(reader.look.remote([ray.put(np.zeros(8, np.uint8))]))
    first, *_ = _once(source, reader, expected)
    wall, mine, theirs, rays = _once(source, reader, expected)
    ray.shutdown()
    return {"first_wall_s": first, "wall_s": wall, "sender_cpu_s": mine + rays, "receiver_cpu_s": theirs}


def _once(source: np.ndarray, reader: Any, expected: int) -> tuple[float, float, float, float]:
    rays, mine, began = _cpu_of_ray(), time.process_time(), time.perf_counter()
    found, theirs = ray.get(reader.look.remote([ray.put(source)]))
    wall, mine, rays = time.perf_counter() - began, time.process_time() - mine, _cpu_of_ray() - rays
    assert found == expected, "what came is not what was sent"
    return wall, mine, theirs, rays


def _cpu_of_ray() -> float:
    """Return the CPU seconds of the raylet and the control store; workers are its children, the reader has its own."""
    spent = 0.0
    for process in psutil.Process().children(recursive=True):
        if process.name() in ("raylet", "gcs_server"):
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[2]))))
