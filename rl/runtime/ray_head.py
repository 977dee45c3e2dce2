"""The processes of a Ray head, less those that no run asks for.

    python -m rl.runtime.ray_head start --head ...

A head starts a server of the dashboard, also where there is no dashboard, and waits for it; `ray.init` starts an
autoscaler's monitor and a monitor of logs as well. Together they take 1.7 of the 5.4 CPU-seconds of a session with one
actor, and a third of its start.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")


@contextmanager
def few_processes() -> Iterator[None]:
    """Let a head that is started in this process, in this context, start what holds and places actors alone."""
    from ray._private.node import Node  # there are options for some of them, in some of the ways to start a head

    kept = {name: getattr(Node, name) for name in _UNUSED if hasattr(Node, name)}

    def start_nothing(self: Any, *_: Any, **__: Any) -> None:
        del self

    for name in kept:
        setattr(Node, name, start_nothing)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def main() -> None:
    """Run Ray's own command line."""
    from ray.scripts.scripts import main as ray

    with few_processes():
        ray()


if __name__ == "__main__":
    sys.exit(main())
