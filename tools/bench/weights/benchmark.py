"""`axl bench weights`: a gigabyte of weights from a trainer to the server and on to a worker, each in its own process.

Interleaved in each round: a copy in memory, a raw stream of the same bytes over loopback, and for sockets and for
shared memory a version that is published and pulled twice, with the contents verified on the device and without. The
first rounds warm up and do not count.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.harness.circumstances import PACKAGES, circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import in_process
from tools.bench.weights import model
from tools.bench.weights.roles import Server, Trainer, Worker
from tools.bench.weights.yardsticks import memcpy, raw_stream

ROUNDS = 7
WARM_UP = 2  # the memory of the first version is used again from the third on
WAYS = {"sockets": False, "shared_memory": True}
PULLS = {"pull": True, "pull_unverified": False}  # verified or not

type Round = dict[str, dict[str, float]]  # operation -> figures


def run(say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return everything that `--json` prints; `quick`: tiny weights, once, as a smoke test."""
    where = machine()  # measured before our own load
    warm_up, counted = (0, 1) if quick else (WARM_UP, ROUNDS)
    rounds: list[Round] = []
    with in_process(Server) as server:
        reach = {"endpoint": server.endpoint(), "cut": model.TINY if quick else 1}
        with in_process(Trainer, **reach) as trainer, in_process(Worker, **reach) as worker:
            for at in range(warm_up + counted):
                rounds.append(_round(at, server, trainer, worker))
                say(f"round {at + 1} of {warm_up + counted} ({warm_up} warm-up)")
    about = {"bench": "weights", "quick": quick, "machine": where}
    return {**about, **summarise(rounds[warm_up:]), **circumstances((*PACKAGES, "xxhash", "zstandard"))}


def _round(at: int, server: Any, trainer: Any, worker: Any) -> Round:
    done: Round = {}

    def with_server(name: str, request: Any, **options: Any) -> None:
        before = server.cpu_s()
        done[name] = request(**options)
        done[name]["server_cpu_s"] = server.cpu_s() - before

    for way, shared in WAYS.items():
        version = 2 * at + shared
        with_server(f"{way}.push", trainer.publish, version=version, shared=shared)
        for name, verify in PULLS.items():
            with_server(f"{way}.{name}", worker.pull, version=version, shared=shared, verify=verify)
        if not shared:
            nbytes = int(done[f"{way}.push"]["nbytes"])
            done |= {"raw_stream": raw_stream(nbytes), "memcpy": memcpy(nbytes)}
    return done


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures: medians over rounds; ratios are of figures of the same round."""
    nbytes = int(rounds[0]["sockets.push"]["nbytes"])
    raw, copy = (_figures(rounds, name, nbytes) for name in ("raw_stream", "memcpy"))
    ways: dict[str, Any] = {}
    for way in WAYS:
        ways[way] = {name: _figures(rounds, f"{way}.{name}", nbytes) for name in ("push", *PULLS)}
        for key, clock in (("ratio_to_raw", "wall_s"), ("cpu_ratio_to_raw", "cpu_s")):
            ways[way][key] = statistics.median(_ratio(one, way, clock) for one in rounds)
    sockets = ways["sockets"]
    return {
        "push_gbps": sockets["push"]["gbps"],
        "pull_gbps": sockets["pull"]["gbps"],
        "raw_stream_gbps": raw["gbps"],
        "ratio_to_raw": sockets["ratio_to_raw"],
        "memcpy_gbps": copy["gbps"],
        "moving": {"nbytes": nbytes, "rounds": len(rounds), "raw_stream": raw, "memcpy": copy, **ways},
    }


def _ratio(one: Round, way: str, clock: str) -> float:
    """Return the speed of the slower of push and pull divided by that of the raw stream, all of one round."""
    return min(one["raw_stream"][clock] / _total(one[f"{way}.{name}"], clock) for name in ("push", "pull"))


def _total(figures: Mapping[str, float], clock: str) -> float:
    return figures[clock] + (figures.get("server_cpu_s", 0.0) if clock == "cpu_s" else 0.0)


def _figures(rounds: Sequence[Round], name: str, nbytes: int) -> dict[str, Any]:
    steps = [one[name] for one in rounds]
    middle = {key: statistics.median(step[key] for step in steps) for key in ("wall_s", "server_cpu_s", "copy_s")
              if key in steps[0]}  # fmt: skip
    cpu_s = statistics.median(_total(step, "cpu_s") for step in steps)
    walls = [step["wall_s"] for step in steps]
    return {"gbps": nbytes / middle["wall_s"] / 1e9, **middle, "cpu_s": cpu_s, "wall_s_by_round": walls}
