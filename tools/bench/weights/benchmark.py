"""`axl bench weights`: a gigabyte of weights from a trainer to the server and on to a worker, each in its own process.

Interleaved in each round: a version that is published and pulled twice, with the contents verified on the device and
without, a raw stream of the same bytes over loopback, and a copy in memory. The first rounds warm up and do not count.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tools.bench.harness.circumstances import PACKAGES, circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import in_process
from tools.bench.harness.sections import Interrupted, run_sections
from tools.bench.weights import model
from tools.bench.weights.roles import Server, Trainer, Worker, memcpy, raw_stream

ROUNDS = 7
WARM_UP = 2  # the memory of the first version is used again from the third on
SECTIONS = {"sockets": 60.0, "shared_memory": 60.0}
WAYS = {"sockets": False, "shared_memory": True}
PULLS = {"pull": True, "pull_unverified": False}  # verified or not

type Round = dict[str, dict[str, float]]  # operation -> figures


def run(sections: Sequence[str], say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return everything that `--json` prints; `quick`: tiny weights, once, as a smoke test."""
    where = machine()  # measured before our own load
    with in_process(Server) as server:
        reach = {"endpoint": server.endpoint(), "cut": model.TINY if quick else 1}
        with in_process(Trainer, **reach) as trainer, in_process(Worker, **reach) as worker:
            measures = {way: partial(_rounds, way, (server, trainer, worker), say, quick) for way in sections}
            found, missing = run_sections(measures, say)
    about = {"bench": "weights", "quick": quick, "missing": missing, "machine": where}
    return {**about, **summarise(found), **circumstances((*PACKAGES, "xxhash", "zstandard"))}


def _rounds(way: str, roles: tuple[Any, Any, Any], say: Say, quick: bool) -> list[Round]:
    """Return the rounds of a way, after those that warm up. Interrupted: with those that there are."""
    warm_up, counted = (0, 1) if quick else (WARM_UP, ROUNDS)
    rounds: list[Round] = []
    try:
        for at in range(warm_up + counted):
            rounds.append(_round(2 * at + WAYS[way], way, *roles))
            pushed = rounds[-1]["push"]
            speed = f"push {pushed['nbytes'] / pushed['wall_s'] / 1e9:.2f} GB/s"
            say(f"round {at + 1} of {warm_up + counted} by {way} ({warm_up} warm-up): {speed}")
    except KeyboardInterrupt:
        if not rounds[warm_up:]:
            raise
        raise Interrupted(rounds[warm_up:]) from None
    return rounds[warm_up:]


def _round(version: int, way: str, server: Any, trainer: Any, worker: Any) -> Round:
    done: Round = {}

    def with_server(name: str, request: Any, **options: Any) -> None:
        before = server.cpu_s()
        done[name] = request(version=version, shared=WAYS[way], **options)
        done[name]["server_cpu_s"] = server.cpu_s() - before

    with_server("push", trainer.publish)
    for name, verify in PULLS.items():
        with_server(name, worker.pull, verify=verify)
    nbytes = int(done["push"]["nbytes"])
    return done | {"raw_stream": raw_stream(nbytes), "memcpy": memcpy(nbytes)}


def summarise(found: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Return the figures of each way that was measured: medians over rounds; ratios are of figures of one round."""
    ways: dict[str, Any] = {}
    for way, rounds in found.items():
        nbytes = int(rounds[0]["push"]["nbytes"])
        ways[way] = {name: _figures(rounds, name, nbytes) for name in ("push", *PULLS, "raw_stream", "memcpy")}
        ways[way] |= {"nbytes": nbytes, "rounds": len(rounds)}
        for key, clock in (("ratio_to_raw", "wall_s"), ("cpu_ratio_to_raw", "cpu_s")):
            ways[way][key] = statistics.median(_ratio(one, clock) for one in rounds)
    sockets = ways.get("sockets")
    names = ("push", "pull", "raw_stream", "memcpy") if sockets else ()
    ratio = {"ratio_to_raw": sockets["ratio_to_raw"]} if sockets else {}
    return {**{f"{name}_gbps": sockets[name]["gbps"] for name in names if sockets}, **ratio, "moving": ways}


def _ratio(one: Round, clock: str) -> float:
    """Return the speed of the slower of push and pull divided by that of the raw stream, all of one round."""
    return min(one["raw_stream"][clock] / _total(one[name], clock) for name in ("push", "pull"))


def _total(figures: Mapping[str, float], clock: str) -> float:
    return figures[clock] + (figures.get("server_cpu_s", 0.0) if clock == "cpu_s" else 0.0)


def _figures(rounds: Sequence[Round], name: str, nbytes: int) -> dict[str, Any]:
    steps = [one[name] for one in rounds]
    middle = {key: statistics.median(step[key] for step in steps) for key in ("wall_s", "server_cpu_s", "copy_s")
              if key in steps[0]}  # fmt: skip
    cpu_s = statistics.median(_total(step, "cpu_s") for step in steps)
    walls = [step["wall_s"] for step in steps]
    return {"gbps": nbytes / middle["wall_s"] / 1e9, **middle, "cpu_s": cpu_s, "wall_s_by_round": walls}
