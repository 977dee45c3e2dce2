"""Upper bounds of the machine: a copy in memory, and a raw TCP stream over loopback without any protocol.

They are measured in the same run as the figures that are compared with them. Memory has been touched before.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tools.bench.harness.processes import in_process


def payload(nbytes: int) -> np.ndarray:
    """Return bytes of which no two pages are alike."""
    block = np.random.default_rng(0).integers(0, 256, min(nbytes, 1 << 24), np.uint8)
    whole = np.resize(block, nbytes)
    whole[::4096] = np.arange(len(whole[::4096]), dtype=np.uint32).astype(np.uint8)
    return whole


def memcpy(nbytes: int) -> dict[str, float]:
    """Measure a copy with one thread."""
    source, target = payload(nbytes), np.ones(nbytes, np.uint8)
    wall, cpu = time.perf_counter(), time.process_time()
    np.copyto(target, source)
    return {"nbytes": nbytes, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


class RawSender:
    """The sending end of a raw stream."""

    def __init__(self, port: int, nbytes: int):
        self._source, self._stream = payload(nbytes), socket.create_connection(("127.0.0.1", port))

    def send(self) -> float:
        """Send all bytes and return the CPU seconds."""
        began = time.process_time()
        self._stream.sendall(self._source)
        return time.process_time() - began


def raw_stream(nbytes: int) -> dict[str, float]:
    """Measure `sendall` in another process and `recv_into` in this one; CPU seconds are those of both sides."""
    target, spent = memoryview(np.zeros(nbytes, np.uint8)), {}
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        listener.settimeout(120)
        with in_process(RawSender, port=listener.getsockname()[1], nbytes=nbytes) as sender:
            stream, _ = listener.accept()
            stream.settimeout(120)
            for _ in range(2):  # the first warms up
                wall, cpu, sent = time.perf_counter(), time.process_time(), thread.submit(sender.send)
                filled = 0
                while filled < nbytes:
                    filled += stream.recv_into(target[filled:])
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                spent = {"nbytes": nbytes, "wall_s": wall, "cpu_s": cpu + sent.result()}
            stream.close()
    return spent
