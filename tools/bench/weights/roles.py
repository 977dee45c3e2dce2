"""Roles of the benchmark: objects that live in processes of their own (`harness.processes.in_process`).

Upper bounds of the machine, a copy in memory and a raw TCP stream over loopback, are measured in the same run. Memory
has been touched before.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.pull.receiver import Receiver
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.endpoint import Endpoint
from tools.bench.harness.processes import in_process
from tools.bench.weights import model

Figures = dict[str, Any]


def reach(endpoint: Endpoint, **settings: Any) -> ParameterServerClient:
    """Return a client of the parameter server at an endpoint."""
    return connect(ParameterServer.Config().set(**settings), [lambda: endpoint])


class Clocks:
    """Wall seconds and this process's CPU seconds inside the `with` block. All processes share the clock of `began`."""

    def __enter__(self) -> "Clocks":
        self.began, self._cpu = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.monotonic() - self.began, time.process_time() - self._cpu


class Server:
    """The parameter server."""

    def __init__(self) -> None:
        self._server = ParameterServer.Config(keep=1, codec="raw").build()

    def endpoint(self) -> Endpoint:
        """Listen, and return where."""
        return self._server.listen()

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()


class Trainer:
    """A trainer that publishes the gigabyte, or a part of it."""

    def __init__(self, endpoint: Endpoint, cut: int = 1):
        self._params = model.random_weights(cut)
        self._publishers = {shared: reach(endpoint, shared_memory=shared).publisher() for shared in (False, True)}

    def publish(self, version: int, shared: bool) -> Figures:
        """Publish; `copy_s`: until the trainer may overwrite its arrays; `wall_s`: until the version can be read."""
        params = jax.block_until_ready(model.updated(self._params, version))
        with Clocks() as clocks:
            push = self._publishers[shared].publish_async(params, version)
            nbytes, copied = push.snapshot().nbytes, time.monotonic()
            push.wait()
        times = {"wall_s": clocks.wall_s, "cpu_s": clocks.cpu_s, "copy_s": copied - clocks.began}
        return {"nbytes": nbytes, **times}


class Worker:
    """A worker that pulls the trainer's versions."""

    def __init__(self, endpoint: Endpoint, cut: int = 1):
        self._endpoint, self._like = endpoint, model.like(cut)
        self._receivers: dict[tuple[bool, bool], tuple[ParameterServerClient, Receiver]] = {}

    def pull(self, version: int, shared: bool, verify: bool) -> Figures:
        """Pull a version to arrays on the device, then release those of the previous version, as a worker does."""
        way = (shared, verify)
        if way not in self._receivers:
            client = reach(self._endpoint, shared_memory=shared, verify=verify)
            self._receivers[way] = client, client.receiver(self._like)
        receiver = self._receivers[way][1]
        with Clocks() as clocks:
            params = jax.block_until_ready(receiver.pull(version, 60.0))
        if int(params["layer0"]["ffn_norm"][0]) != version:
            raise AssertionError(f"version {version} was asked for")
        self._in_use = params
        return {"wall_s": clocks.wall_s, "cpu_s": clocks.cpu_s}


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
