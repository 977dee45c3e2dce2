"""Ways to move a gigabyte between two processes: our RPCs and shared memory, Arrow Flight, Ray's object store.

Each round uses each way once, in fresh processes: one transfer to warm up (connections, memory that is touched for the
first time, the receive window), one measured. What arrives is compared with what was sent, outside the measured time.
"""

import logging
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import xxhash

from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.server import Body, RpcServer
from rl.parameter_server.transport.shared_memory import SharedSegment
from tools.bench.harness.environments import PEERS
from tools.bench.harness.interleave import peer_commands
from tools.bench.harness.processes import Command, MeasurementFailed, in_process, run_command
from tools.bench.weights.yardsticks import memcpy, payload, raw_stream

ROUNDS = 5
CONNECTIONS = {"wire": 1, "wire_4": 4, "wire_digests": 1}
OURS = (*CONNECTIONS, "shared_memory", "shared_memory_held")


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `transports`: medians over rounds by way, and why a way was left out."""
    nbytes, rounds = (3_000_001, 1) if quick else (10**9, ROUNDS)
    commands, errors = peer_commands("weights", [PEERS["arrow_flight"]], lambda line: print(line, file=sys.stderr))
    ways = ["raw_stream", "memcpy", *OURS, *commands, "ray_store"]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in [way for way in ways if way not in errors]:
            try:
                found[way].append(transfer(way, nbytes, commands))
            except (MeasurementFailed, OSError) as error:
                errors[way] = str(error)
    measured = {}
    for way in ways:
        if way not in errors:
            middle = {name: statistics.median(step[name] for step in found[way]) for name in found[way][0]}
            pairs = zip(found["raw_stream"], found[way], strict=True)
            to_raw = statistics.median(raw["cpu_s"] / step["cpu_s"] for raw, step in pairs)
            measured[way] = {**middle, "gbps": nbytes / middle["wall_s"] / 1e9, "cpu_speed_to_raw": to_raw}
    return {"transports": {"nbytes": nbytes, "rounds": rounds, "ways": measured, "left_out": errors}}


def transfer(way: str, nbytes: int, commands: dict[str, Command]) -> dict[str, float]:
    """Measure one way once: seconds of the measured transfer, CPU seconds of both sides."""
    if way == "raw_stream":
        return raw_stream(nbytes)
    if way == "memcpy":
        return memcpy(nbytes)
    if way == "ray_store":
        with in_process(RayStore, nbytes=nbytes) as store:
            return store.transfer()
    if way in commands:
        command = commands[way]
        return run_command(Command((*command.argv, str(nbytes)), command.environ))
    sent = xxhash.xxh3_128_hexdigest(payload(nbytes))
    with (
        in_process(Sender, way=way, nbytes=nbytes) as sender,
        in_process(Receiver, way=way, nbytes=nbytes, endpoint=sender.endpoint()) as receiver,
    ):
        first, before = receiver.pull(), sender.cpu_s()
        second = receiver.pull()
        theirs, mine = sender.cpu_s() - before, second["cpu_s"]
    if not first["digest"] == second["digest"] == sent:
        raise AssertionError(f"{way}: what came is not what was sent")
    sides = {"cpu_s": theirs + mine, "sender_cpu_s": theirs, "receiver_cpu_s": mine}
    return {"wall_s": second["wall_s"], "first_wall_s": first["wall_s"], **sides}


class Sender:
    """The process that holds the payload and serves it on request."""

    def __init__(self, way: str, nbytes: int):
        self._way, self._source = way, payload(nbytes)
        self._fill()
        self._server = RpcServer(self._read if way in CONNECTIONS else self._map)

    def endpoint(self) -> Endpoint:
        """Return where it listens."""
        return self._server.endpoint

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()

    def _read(self, operation: str, fields: dict[str, Any], body: Body) -> Any:
        part = self._source[fields["start"] : fields["stop"]]
        return {"digest": xxhash.xxh3_128_hexdigest(part) if self._way == "wire_digests" else ""}, [part]

    def _map(self, operation: str, fields: dict[str, Any], body: Body) -> Any:
        """Name a segment: a new one, as each version of the weights has its own, or the one that was filled before."""
        if self._way == "shared_memory":
            self._fill()
        assert self._segment is not None
        return {"name": self._segment.name}

    def _fill(self) -> None:
        self._segment = None  # the old one is released first
        if self._way not in CONNECTIONS:
            self._segment = SharedSegment.create(self._source.nbytes)
            self._segment.write(self._source)


class Receiver:
    """The process that moves the payload to its memory."""

    def __init__(self, way: str, nbytes: int, endpoint: Endpoint):
        self._client = RpcClient(endpoint, name="sender", connect_timeout=120)
        self._target, self._parts = np.zeros(nbytes, np.uint8), CONNECTIONS.get(way, 0)
        self._threads = ThreadPoolExecutor(self._parts or 1)

    def pull(self) -> dict[str, Any]:
        """Move the payload once."""
        wall, cpu = time.perf_counter(), time.process_time()
        received = self._over_sockets() if self._parts else self._mapped()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall_s": wall, "cpu_s": cpu, "digest": xxhash.xxh3_128_hexdigest(received)}

    def _over_sockets(self) -> np.ndarray:
        cuts = [len(self._target) * at // self._parts for at in range(self._parts + 1)]

        def part(start: int, stop: int) -> None:
            place = self._target[start:stop]
            fields, _ = self._client.call("read", {"start": start, "stop": stop}, into=lambda fields, nbytes: [place])
            if fields["digest"] and xxhash.xxh3_128_hexdigest(place) != fields["digest"]:
                raise AssertionError("damaged on the way")

        list(self._threads.map(part, cuts, cuts[1:]))
        return self._target

    def _mapped(self) -> np.ndarray:
        fields, _ = self._client.call("read")
        segment = SharedSegment.attach(fields["name"], len(self._target))
        read_once(segment.buffer)
        return segment.buffer


def read_once(memory: np.ndarray) -> int:
    """Read every byte, as a copy to a device would: memory that is only mapped has not been moved."""
    words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
    return int(np.bitwise_xor.reduce(words))


def _get(references: list[Any]) -> tuple[int, float]:
    """Run in an actor: return the combined words of the array, and the CPU seconds used."""
    import ray

    began = time.process_time()
    return read_once(ray.get(references[0])), time.process_time() - began


class RayStore:
    """A process with a Ray of its own: `ray.put` here, `ray.get` in a worker that reads every byte."""

    def __init__(self, nbytes: int):
        import ray

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        memory = int(nbytes * 2.5) + (100 << 20)
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=memory, _node_ip_address="127.0.0.1",
                 logging_level=logging.ERROR, log_to_driver=False)  # fmt: skip
        self._source, self._get = payload(nbytes), ray.remote(_get)

    def transfer(self) -> dict[str, float]:
        """Move the payload twice; CPU seconds of Ray's own processes count as the sender's."""
        import ray

        expected, walls, mine, theirs = read_once(self._source), [], 0.0, 0.0
        for _ in range(2):
            rays, mine, began = _cpu_of_ray(), time.process_time(), time.perf_counter()
            found, theirs = ray.get(self._get.remote([ray.put(self._source)]))
            walls, mine = [*walls, time.perf_counter() - began], time.process_time() - mine + _cpu_of_ray() - rays
            assert found == expected, "what came is not what was sent"
        ray.shutdown()
        sides = {"cpu_s": mine + theirs, "sender_cpu_s": mine, "receiver_cpu_s": theirs}
        return {"wall_s": walls[1], "first_wall_s": walls[0], **sides}


def _cpu_of_ray() -> float:
    """Return the CPU seconds of the raylet and the control store; its workers count their own."""
    processes = [one for one in psutil.Process().children(recursive=True) if one.name() in ("raylet", "gcs_server")]
    return sum(one.cpu_times().user + one.cpu_times().system for one in processes)
