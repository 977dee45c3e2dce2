"""Effect of new weights on a decoding engine: pause of the swap, transfer during decoding, age of the weights.

A trainer publishes the benchmark's policy every 0.3 s; this process decodes with it, a `Prefetcher` fetches the newest
version on its thread and places it for the engine, and between two dispatches the engine swaps a pointer.
Separate figures: `pause` (no decoding: the query for newer weights and `set_weights`), `transfer_s` (from the call to
arrays in the engine's form, during decoding), `age_s` (since the next version was published, 0 if there is none) and
`versions_behind`, the last two for the weights that each dispatch uses.
"""

import bisect
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.parameter_server.transport.endpoint import Endpoint
from tools.bench.harness.processes import in_process
from tools.bench.rollout.sections.bed import Bed
from tools.bench.weights.sections.roles import Server, reach

EVERY_S = 0.3
SWAPS = 100
WAYS = {"shared_memory": True, "sockets": False}


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the keys `pause_ms_p50` and `pause_ms_p99`, the worst of the ways, and `pause`."""
    bed, ways = Bed(quick=quick), {}
    with in_process(Server, keep=4) as server:
        endpoint, first = server.endpoint(), 0
        with in_process(PolicyTrainer, endpoint=endpoint, quick=quick) as trainer:
            for way, shared in WAYS.items():
                access = reach(endpoint, shared_memory=shared)
                begin = partial(trainer.begin, first=first, every=EVERY_S, shared=shared)
                swaps = 3 if quick else SWAPS
                ways[way] = draw_and_follow(bed, access, begin, trainer.end, first=first, swaps=swaps)
                first = 1_000_000  # higher than all earlier versions
    worst = {f"pause_ms_p{percent}": max(one[f"pause_ms_p{percent}"] for one in ways.values()) for percent in (50, 99)}
    return {**worst, "pause": {"published_every_s": EVERY_S, **ways}}


class PolicyTrainer:
    """A trainer that publishes the policy of the engine's benchmark periodically."""

    def __init__(self, endpoint: Endpoint, quick: bool):
        self._params = Bed(quick=quick).params()
        self._publishers = {shared: reach(endpoint, shared_memory=shared).publisher() for shared in (False, True)}

    def begin(self, first: int, every: float, shared: bool) -> None:
        """Publish version `first`, and from then on, in the background, the next one every `every` seconds."""
        self._published: list[tuple[int, float]] = []
        self._stop = threading.Event()
        self._publish(first, shared)
        self._thread = threading.Thread(target=self._continue, args=(first + 1, every, shared))
        self._thread.start()

    def end(self) -> list[tuple[int, float]]:
        """Stop publishing; return the versions, with the time at which each was published."""
        self._stop.set()
        self._thread.join()
        return self._published

    def _continue(self, version: int, every: float, shared: bool) -> None:
        while not self._stop.wait(every):
            self._publish(version, shared)
            version += 1

    def _publish(self, version: int, shared: bool) -> None:
        params = jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1.0001, self._params))
        self._publishers[shared].publish_async(params, version).wait()
        self._published.append((version, time.monotonic()))


def draw_and_follow(
    bed: Bed,
    access: ParameterServerClient,
    begin: Callable[[], object],
    end: Callable[[], Sequence[tuple[int, float]]],
    *,
    first: int,
    swaps: int,
) -> dict[str, Any]:
    """Decode without a break until there have been so many swaps."""
    max_num_seqs, new = (4, 32) if bed.quick else (32, 256)
    engine = bed.engine(max_num_seqs=max_num_seqs, max_prompt_tokens=bed.job.prompt_tokens, max_new_tokens=new)
    begin()
    prefetcher = Prefetcher(access.receiver(engine.runner.weights_like), engine.place, newest=True)
    engine.set_weights(prefetcher.take(first, 60.0)[0], first)
    for request in bed.requests([new] * max_num_seqs, prompt_tokens=bed.job.prompt_tokens):
        engine.submit(request)
    engine.step()  # compiles
    pauses, inside, transfers, turns = [], [], [], []
    uses: list[tuple[int, float]] = []  # version and time of each dispatch
    while len(pauses) < swaps:
        began, swapped = time.monotonic(), engine.stats()["swap_seconds"]
        found = prefetcher.newer()
        if found is not None:
            version, placed, moved = found
            engine.set_weights(placed, version)
            pauses.append(time.monotonic() - began)
            inside.append(engine.stats()["swap_seconds"] - swapped)
            transfers.append(moved.seconds)
        began = time.monotonic()
        uses.append((engine.version, began))
        for _ in engine.step():
            engine.submit(bed.request(new, prompt_tokens=bed.job.prompt_tokens))
        turns.append(time.monotonic() - began)
    prefetcher.close()
    published = end()
    engine.abort_all()
    age, behind = _ages(uses, published)
    return {
        **_percentiles("pause_ms", 1e3, pauses),
        **_percentiles("set_weights_ms", 1e3, inside),
        **_percentiles("transfer_s", 1, transfers),
        **_percentiles("age_s", 1, age),
        "versions_behind_mean": statistics.mean(behind),
        "versions_behind_max": max(behind),
        "turn_ms_p50": 1e3 * statistics.median(turns),
        "swaps": swaps,
        "published": len(published),
        "dispatches": len(uses),
    }


def _ages(uses: Sequence[tuple[int, float]], published: Sequence[Sequence[float]]) -> tuple[list[float], list[int]]:
    """Return for each use the seconds since a newer version was published, 0 if none; and how many were newer."""
    times = [at for _, at in published]  # ascending
    place = {int(version): index for index, (version, _) in enumerate(published)}
    ages, behind = [], []
    for version, at in uses:
        mine, newest = place[version], bisect.bisect_right(times, at) - 1
        behind.append(max(0, newest - mine))
        ages.append(at - times[mine + 1] if newest > mine else 0.0)
    return ages, behind


def _percentiles(name: str, unit: float, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{percent}": unit * float(np.percentile(seconds, percent)) for percent in (50, 99)}
