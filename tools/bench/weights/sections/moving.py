"""Transfer of a gigabyte of weights from a trainer to the server and on to a worker, each in its own process.

Interleaved in each round: a copy in memory, a raw stream of the same bytes over loopback, and for sockets and for
shared memory a version that is published and pulled twice, with the contents verified on the device and without. The
first rounds warm up and do not count.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.bench.transports.yardsticks import Spent, memcpy_gbps, raw_stream_gbps
from tools.bench.weights.sections import model
from tools.bench.weights.sections.roles import Process

ROUNDS = 7
WARM_UP = 2  # the memory of the first version is used again from the third on
WAYS = {"sockets": False, "shared_memory": True}
PULLS = {"pull": True, "pull_unverified": False}  # verified or not

type Round = dict[str, dict[str, float]]  # operation -> figures


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the section's keys (see `summarise`)."""
    with Process("server") as server:
        reach = {"place": server.ready, "cut": model.TINY if quick else 1}
        with Process("trainer", **reach) as trainer, Process("worker", **reach) as worker:
            rounds = [dict(_round(at, server, trainer, worker)) for at in range(WARM_UP + (1 if quick else ROUNDS))]
    return summarise(rounds[WARM_UP:])


def _round(at: int, server: Process, trainer: Process, worker: Process) -> Iterator[tuple[str, dict[str, float]]]:
    for way, shared in WAYS.items():
        version = 2 * at + shared
        pushed = _with_server(server, trainer, "publish", version=version, shared=shared)
        yield f"{way}.push", pushed
        nbytes = int(pushed["nbytes"])
        for name, verify in PULLS.items():
            yield f"{way}.{name}", _with_server(server, worker, "pull", version=version, shared=shared, verify=verify)
        if not shared:
            yield "raw_stream", _yardstick(raw_stream_gbps(nbytes, rounds=1))
            yield "memcpy", _yardstick(memcpy_gbps(nbytes, rounds=1))


def _with_server(server: Process, role: Process, what: str, **fields: Any) -> dict[str, float]:
    """Return the role's figures, with the CPU seconds of the server in the same time."""
    before = server.cpu_s()
    done = role.ask(what, **fields)
    return {**done, "server_cpu_s": server.cpu_s() - before}


def _yardstick(spent: Spent) -> dict[str, float]:
    return {"nbytes": spent.nbytes, "wall_s": spent.wall_s, "cpu_s": spent.cpu_s}


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the section's keys: medians over rounds; ratios are of figures of the same round."""
    nbytes = int(rounds[0]["sockets.push"]["nbytes"])
    ways = {way: _way(way, rounds, nbytes) for way in WAYS}
    raw, copy = (_figures(rounds, name, nbytes) for name in ("raw_stream", "memcpy"))
    sockets = ways["sockets"]
    return {
        "push_gbps": sockets["push"]["gbps"],
        "pull_gbps": sockets["pull"]["gbps"],
        "raw_stream_gbps": raw["gbps"],
        "ratio_to_raw": sockets["ratio_to_raw"],
        "memcpy_gbps": copy["gbps"],
        "moving": {"nbytes": nbytes, "rounds": len(rounds), "raw_stream": raw, "memcpy": copy, **ways},
    }


def _way(way: str, rounds: Sequence[Round], nbytes: int) -> dict[str, Any]:
    steps = {name: _figures(rounds, f"{way}.{name}", nbytes) for name in ("push", *PULLS)}
    slower = statistics.median(_ratio(one, way, "wall_s") for one in rounds)
    dearer = statistics.median(_ratio(one, way, "cpu_s") for one in rounds)
    return {**steps, "ratio_to_raw": slower, "cpu_ratio_to_raw": dearer}


def _ratio(one: Round, way: str, clock: str) -> float:
    """Return the speed of the slower of push and pull divided by that of the raw stream, all of one round."""
    return min(one["raw_stream"][clock] / _total(one[f"{way}.{name}"], clock) for name in ("push", "pull"))


def _total(figures: Mapping[str, float], clock: str) -> float:
    return figures[clock] + (figures.get("server_cpu_s", 0.0) if clock == "cpu_s" else 0.0)


def _figures(rounds: Sequence[Round], name: str, nbytes: int) -> dict[str, Any]:
    steps = [one[name] for one in rounds]
    middle = lambda key: statistics.median(step[key] for step in steps)  # noqa: E731
    found = {
        "gbps": nbytes / middle("wall_s") / 1e9,
        "wall_s": middle("wall_s"),
        "cpu_s": statistics.median(_total(step, "cpu_s") for step in steps),
        "wall_s_by_round": [step["wall_s"] for step in steps],
    }
    extra = [key for key in ("server_cpu_s", "copy_s") if key in steps[0]]
    return found | {key: middle(key) for key in extra}
