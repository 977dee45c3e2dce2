"""The sending process of one way: it holds the payload and serves it on request.

    python -m tools.bench.transports.sending WAY NBYTES

It prints its address as JSON; then, for each line on its standard input, the CPU seconds that it has used so far.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rl.parameter_server.transport.server import Body, RpcServer
from rl.parameter_server.transport.shared_memory import Segment
from rl.parameter_server.transport.tls import Tls
from tools.bench.transports.yardsticks import payload

Address = dict[str, Any]


def send(way: str, nbytes: int, options: dict[str, str]) -> None:
    """Serve until standard input ends."""
    address = SENDERS[way](payload(nbytes), options)
    print(json.dumps(address), flush=True)
    for _ in sys.stdin:
        print(json.dumps(time.process_time()), flush=True)


def _wire(source: np.ndarray, options: dict[str, str]) -> Address:
    return _serve(source, None, with_digests=False)


def _wire_digests(source: np.ndarray, options: dict[str, str]) -> Address:
    return _serve(source, None, with_digests=True)


def _wire_tls(source: np.ndarray, options: dict[str, str]) -> Address:
    folder = Path(options["certificate"])
    return _serve(source, Tls.Config(cert=str(folder / "cert.pem"), key=str(folder / "key.pem")).build(), False)


def _serve(source: np.ndarray, tls: Tls | None, with_digests: bool) -> Address:
    def handle(operation: str, fields: dict[str, Any], body: Body) -> Any:
        part = source[fields["start"] : fields["stop"]]
        return {"digest": xxhash.xxh3_128_hexdigest(part) if with_digests else ""}, [part]

    server = RpcServer(handle, tls=tls)
    _kept.append(server)
    return dataclasses.asdict(server.endpoint)


def _segments(source: np.ndarray, options: dict[str, str]) -> Address:
    """Serve each request from a new segment, as each version of the weights has its own."""

    def handle(operation: str, fields: dict[str, Any], body: Body) -> Any:
        _segment.clear()
        segment = Segment.create(source.nbytes)
        segment.write(source)
        _segment.append(segment)
        return {"name": segment.name}

    server = RpcServer(handle)
    _kept.append(server)
    return dataclasses.asdict(server.endpoint)


def _held_segment(source: np.ndarray, options: dict[str, str]) -> Address:
    """Serve from one existing segment, to which the trainer has copied the weights from its device."""
    segment = Segment.create(source.nbytes)
    segment.write(source)
    _segment.append(segment)
    server = RpcServer(lambda operation, fields, body: {"name": segment.name})
    _kept.append(server)
    return dataclasses.asdict(server.endpoint)


_kept: list[RpcServer] = []
_segment: list[Segment] = []
SENDERS: dict[str, Callable[[np.ndarray, dict[str, str]], Address]] = {
    "wire": _wire,
    "wire_fresh": _wire,
    "wire_2": _wire,
    "wire_4": _wire,
    "wire_digests": _wire_digests,
    "wire_tls": _wire_tls,
    "shared_memory": _segments,
    "shared_memory_held": _held_segment,
}


if __name__ == "__main__":
    send(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
