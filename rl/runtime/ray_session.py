"""Ray for the length of a run, with our words only on the terminal and sockets on loopback only."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def ray_session() -> Iterator[None]:
    """`RAY_ADDRESS`'s cluster, or one of our own on loopback. A session that is open already is used and left open."""
    if ray.is_initialized():
        yield
        return
    with _signals_kept(), warnings.catch_warnings():
        # Ray starts its processes by fork and exec, JAX warns of every fork; nothing runs between the two.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
        else:
            ray.init(
                num_cpus=64,  # roles are processes, not cores: placement on one machine is not Ray's to limit
                include_dashboard=False,
                object_store_memory=256 << 20,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` takes SIGTERM for an exit at once; ours saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
