"""One way, measured in this process and in a sending process that it starts; the result is JSON.

    python -m tools.bench.transports.receiving WAY NBYTES OPTIONS

A gigabyte is moved twice: the first time warms up (connections, memory that is touched for the first time, the
receive window), the second is measured. The received bytes are compared with those sent, outside the measured time.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.shared_memory import Segment
from tools.bench.transports.yardsticks import ROOT, payload

Pull = Callable[[], np.ndarray]  # moves the payload once and returns where it then is


def measure(way: str, nbytes: int, options: dict[str, str]) -> dict[str, float]:
    """Measure the seconds of the first and the second transfer, and CPU seconds of both sides in the second."""
    with _sender(way, nbytes, options) as (address, their_cpu):
        endpoint = Endpoint(**address)
        pull = PULLS[way](endpoint, nbytes)
        began = time.perf_counter()
        received = pull()
        first = time.perf_counter() - began
        _check(received, nbytes)
        del received
        theirs, mine, began = their_cpu(), time.process_time(), time.perf_counter()
        received = pull()
        wall, mine, theirs = time.perf_counter() - began, time.process_time() - mine, their_cpu() - theirs
        _check(received, nbytes)
    return {"first_wall_s": first, "wall_s": wall, "sender_cpu_s": theirs, "receiver_cpu_s": mine}


def _check(received: np.ndarray, nbytes: int) -> None:
    if xxhash.xxh3_128_hexdigest(received) != xxhash.xxh3_128_hexdigest(payload(nbytes)):
        raise AssertionError("what came is not what was sent")


@contextlib.contextmanager
def _sender(way: str, nbytes: int, options: dict[str, str]) -> Iterator[tuple[dict[str, Any], Callable[[], float]]]:
    command = [sys.executable, "-m", "tools.bench.transports.sending", way, str(nbytes), json.dumps(options)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def cpu() -> float:
            stdin.write("\n")
            stdin.flush()
            return float(json.loads(stdout.readline()))

        try:
            yield json.loads(stdout.readline()), cpu
            stdin.close()  # it ends by itself and frees its segments
            process.wait(30)
        finally:
            process.kill()


def _sockets(connections: int, *, fresh: bool = False) -> Callable[[Endpoint, int], Pull]:
    def prepare(endpoint: Endpoint, nbytes: int) -> Pull:
        client = RpcClient(endpoint, name="sender", connect_timeout=120)
        kept = np.zeros(nbytes, np.uint8)
        cuts = [nbytes * at // connections for at in range(connections + 1)]
        pool = ThreadPoolExecutor(connections)

        def part(at: int, target: np.ndarray) -> None:
            start, stop = cuts[at], cuts[at + 1]
            place = target[start:stop]
            fields, _ = client.call("read", {"start": start, "stop": stop}, into=lambda fields, nbytes: [place])
            if fields["digest"] and xxhash.xxh3_128_hexdigest(place) != fields["digest"]:
                raise AssertionError("damaged on the way")

        def pull() -> np.ndarray:
            target = np.empty(nbytes, np.uint8) if fresh else kept
            list(pool.map(lambda at: part(at, target), range(connections)))
            return target

        return pull

    return prepare


def _memory(endpoint: Endpoint, nbytes: int) -> Pull:
    client = RpcClient(endpoint, name="sender", connect_timeout=120)

    def pull() -> np.ndarray:
        fields, _ = client.call("read")
        segment = Segment.attach(fields["name"], nbytes)
        read_once(segment.buffer)
        return segment.buffer

    return pull


def read_once(memory: np.ndarray) -> int:
    """Read every byte, as a copy to a device would: memory that is only mapped has not been moved."""
    words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
    return int(np.bitwise_xor.reduce(words))


PULLS: Mapping[str, Callable[[Endpoint, int], Pull]] = {
    "wire": _sockets(1),
    "wire_fresh": _sockets(1, fresh=True),
    "wire_2": _sockets(2),
    "wire_4": _sockets(4),
    "wire_digests": _sockets(1),
    "wire_tls": _sockets(1),
    "shared_memory": _memory,
    "shared_memory_held": _memory,
}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
