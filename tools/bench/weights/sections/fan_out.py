"""One version pulled by eight workers: alternately with peer-to-peer broadcast, and directly from the server.

Each worker is a process of its own; all data goes over sockets. The server counts the bytes that it sends; seconds are
from the publication to the last worker's arrays. On one machine everything shares memory and cores, so the broadcast
cannot be faster here: it saves the server's network bandwidth.
"""

import contextlib
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from tools.bench.harness.processes import in_process
from tools.bench.weights.sections import model
from tools.bench.weights.sections.roles import Server, Trainer, Worker

WORKERS = 8
ROUNDS = 5
_WAYS = {"peer_to_peer": True, "direct": False}


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `fan_out`."""
    workers, rounds = (3, 1) if quick else (WORKERS, ROUNDS)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(in_process(Server))
        reach = {"endpoint": server.endpoint(), "cut": model.TINY if quick else 4}
        trainer = stack.enter_context(in_process(Trainer, **reach))
        fleet = [stack.enter_context(in_process(Worker, **reach, name=f"worker-{at}")) for at in range(workers)]
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        version, nbytes = 0, 0
        for at in range(1 + rounds):
            for way, peer_to_peer in _WAYS.items():
                one = _once(server, trainer, fleet, threads, version, peer_to_peer)
                version, nbytes = version + 1, int(one.pop("nbytes"))
                if at:  # the first warms up
                    found[way].append(one)
    ways = {way: jax.tree.map(lambda *each: statistics.median(each), *steps) for way, steps in found.items()}
    return {"fan_out": {"workers": workers, "nbytes": nbytes, "rounds": rounds, **ways}}


def _once(
    server: Any, trainer: Any, fleet: Sequence[Any], threads: ThreadPoolExecutor, version: int, peer_to_peer: bool
) -> dict[str, float]:
    server.sent()
    before = server.cpu_s() + sum(worker.cpu_s() for worker in fleet)
    pulling = [threads.submit(worker.pull, version, peer_to_peer=peer_to_peer) for worker in fleet]
    published = trainer.publish(version, shared=False)
    pulls = [one.result() for one in pulling]
    after = server.cpu_s() + sum(worker.cpu_s() for worker in fleet)
    return {
        "nbytes": published["nbytes"],
        "server_copies": server.sent() / published["nbytes"],
        "seconds_to_last": max(pull["at"] for pull in pulls) - published["at"],
        "seconds_to_median": statistics.median(pull["at"] for pull in pulls) - published["at"],
        "by_workers": sum(pull["source"] == "worker" for pull in pulls),
        "cpu_s": after - before,
    }
