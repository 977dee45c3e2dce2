"""Upper bounds of the machine: a copy in memory, and a raw TCP stream over loopback without any protocol.

They are measured in the same run as the figures that are compared with them.
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
GO = b"\n"


@dataclass(frozen=True)
class Spent:
    """Time to move `nbytes`.

    Attributes:
        wall_s: seconds until the last byte was there.
        cpu_s: CPU seconds of both sides.
    """

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def gbps(self) -> float:
        """Return the gigabytes (10^9) per second."""
        return self.nbytes / self.wall_s / 1e9


def memcpy_gbps(nbytes: int, rounds: int = 3) -> Spent:
    """Measure a copy to memory that has been touched before, with one thread; medians."""
    source, target = payload(nbytes), np.ones(nbytes, np.uint8)
    return medians([_timed(nbytes, lambda: np.copyto(target, source)) for _ in range(rounds)])


def raw_stream_gbps(nbytes: int, rounds: int = 3) -> Spent:
    """Measure `sendall` in one process and `recv_into` in this one, to memory that has been touched before; medians."""
    target = memoryview(np.zeros(nbytes, np.uint8))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(120)
    command = [sys.executable, "-m", __name__, str(listener.getsockname()[1]), str(nbytes)]
    with listener, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as sender:
        try:
            stream, _ = listener.accept()
            with stream:
                stream.settimeout(120)
                spent = [_one_stream(stream, target, sender) for _ in range(rounds + 1)][1:]  # the first warms up
        except BaseException:
            sender.kill()
            raise
    return medians(spent)


def medians(spent: list[Spent]) -> Spent:
    """Return the median of each figure by itself."""
    return Spent(
        spent[0].nbytes,
        statistics.median(one.wall_s for one in spent),
        statistics.median(one.cpu_s for one in spent),
    )


def payload(nbytes: int) -> np.ndarray:
    """Return bytes of which no two pages are alike."""
    block = np.random.default_rng(0).integers(0, 256, min(nbytes, 1 << 24), np.uint8)
    whole = np.resize(block, nbytes)
    whole[::4096] = np.arange(len(whole[::4096]), dtype=np.uint32).astype(np.uint8)
    return whole


def _timed(nbytes: int, work: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(nbytes, time.perf_counter() - wall, time.process_time() - cpu)


def _one_stream(stream: socket.socket, target: memoryview, sender: subprocess.Popen[str]) -> Spent:
    def receive() -> None:
        stream.sendall(GO)
        filled = 0
        while filled < len(target):
            count = stream.recv_into(target[filled:])
            if not count:
                raise ConnectionError("the sender has ended")
            filled += count

    mine = _timed(len(target), receive)
    assert sender.stdout is not None
    theirs = json.loads(sender.stdout.readline())
    return Spent(mine.nbytes, mine.wall_s, mine.cpu_s + theirs)


def _send(port: int, nbytes: int) -> None:
    """Run the sending process: send all bytes on each request of the other side."""
    source = payload(nbytes)
    with socket.create_connection(("127.0.0.1", port)) as stream:
        while stream.recv(1):
            cpu = time.process_time()
            stream.sendall(source)
            print(json.dumps(time.process_time() - cpu), flush=True)


if __name__ == "__main__":
    _send(int(sys.argv[1]), int(sys.argv[2]))
