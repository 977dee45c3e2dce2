"""`axl bench retrieval`: latency and memory beside faiss, in turns; foreign results."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.benches.peers import find_peers, peer_commands
from tests.benches.retrieval.data import COUNT, RetrievalData, RetrievalJob, make, write
from tests.benches.retrieval.ours import shared
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Measured, Say, errors_of, measure, ratio_over_rounds
from tools.bench.harness.processes import Command, our_command
from tools.bench.harness.sections import run_sections

SECTIONS = {"latency": 120.0, "foreign": 60.0}
QUICK = RetrievalJob(documents=3000, width=8, tenants=150, clusters=40, queries=20)
FIELDS = tuple(f"{size}_{what}" for size in ("small", "large") for what in ("cpu_us", "us", "recall"))
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SYSTEMS = {"ours": "shared", "ours_per_tenant": "apart", "faiss_filtered_ivf": "filtered", "faiss_per_tenant": "apart"}


def run(sections: Sequence[str], say: Say, peers: Sequence[str] = (), *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `missing`: those that Ctrl-C has left out.

    Args:
        sections: some of `SECTIONS`.
        say: shows progress.
        peers: `faiss`, or nobody.
        quick: a tiny job.
    """
    where, job = machine(), QUICK if quick else RetrievalJob()
    find_peers(peers, "retrieval")
    say(f"drawing {job.documents} vectors and {job.tenants} tenants")
    data = make(job)
    measures: Mapping[str, Callable[[], dict[str, Any]]] = {
        "latency": partial(latency, data, peers, 2 if quick else 10, say),
        "foreign": partial(foreign, data, 500 if quick else 100_000),
    }
    found, missing = run_sections({name: measures[name] for name in sections}, say)
    about = {"bench": "retrieval", "job": dataclasses.asdict(job), "missing": missing}
    about |= {"machine": where, **circumstances()}
    return about | {figure: value for figures in found.values() for figure, value in figures.items()}


def latency(data: RetrievalData, peers: Sequence[str], rounds: int, say: Say) -> dict[str, Any]:
    """Return microseconds of a query, recall and bytes of all systems, which take turns, and the ratios to ours."""
    with tempfile.TemporaryDirectory(prefix="axl-bench-") as folder:
        path = Path(folder) / "job.npz"
        write(path, data)
        commands: dict[str, Command] = {}
        errors: dict[str, str] = {}
        for name, kind in _SYSTEMS.items():
            if name.startswith("ours"):
                made = our_command("tests.benches.retrieval.ours", kind, str(path))
                commands[name] = Command(made.argv, {**made.environ, **_ONE_THREAD})
                continue
            theirs, failed = peer_commands("retrieval", find_peers(peers, "retrieval"), say, kind, str(path))
            errors |= failed
            for command in theirs.values():
                commands[name] = command
        results = measure(commands, rounds, say, FIELDS)
    errors |= errors_of(results)
    systems = {name: _figures(one) for name, one in results.items() if one.error is None}
    return {"systems": systems, **_ratios(data, results, systems), "errors": errors}


def _figures(one: Measured) -> dict[str, float]:
    return {name: one.median(name) for name in FIELDS}


def _ratios(data: RetrievalData, results: Mapping[str, Measured], systems: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of CPU microseconds and of bytes; None where a system was not measured."""
    figures: dict[str, Any] = {}
    if "ours" not in systems:
        return figures
    used: dict[str, Any] = {}
    for name in systems:
        with contextlib.suppress(KeyError):
            used |= results[name].ready["bytes"]
    ours = sum(used[name] for name in ("vectors", "tree", "tenants", "rest"))
    figures["bytes"] = used | {"ours": ours}
    pairs = {"vs_filtered_ivf": "faiss_filtered_ivf", "vs_per_tenant": "faiss_per_tenant"}
    for figure, name in {**pairs, "vs_per_tenant_same_code": "ours_per_tenant"}.items():
        for size in ("small", "large"):
            ratio = ratio_over_rounds(results["ours"], results.get(name), operator.itemgetter(f"{size}_cpu_us"))
            if ratio is not None and name == "faiss_filtered_ivf":
                ratio = 1 / ratio  # times as fast as filtered search, times as slow as an index of one tenant
            figures[figure if size == "small" else f"{figure}_large"] = ratio
    ivf, graph = used.get("ivf"), used.get("hnsw_per_vector")
    figures["memory_vs_ivf"] = ivf and ours / ivf
    figures["memory_below_hnsw"] = graph and graph * sum(map(len, data.seen)) / ours
    return figures


def foreign(data: RetrievalData, queries: int) -> dict[str, Any]:
    """Return the results that a tenant may not see, among queries between which documents change hands."""
    index, rng = shared(data), np.random.default_rng(1)
    seen, foreign_results, found = [set(one.tolist()) for one in data.seen], 0, 0
    for number in range(queries):
        tenant = int(rng.integers(len(seen)))
        if number % 50 == 0:
            moved = rng.choice(len(data.vectors), 5, replace=False)
            index.grant(str(tenant), moved)
            seen[tenant] |= set(moved.tolist())
            other = int(rng.integers(len(seen)))
            index.revoke(str(other), moved)
            seen[other] -= set(moved.tolist())
        ids, _ = index.search(data.vectors[rng.integers(len(data.vectors))], str(tenant), COUNT)
        foreign_results += len(set(ids.tolist()) - seen[tenant])
        found += len(ids)
    return {"foreign_results": foreign_results, "foreign_queries": queries, "foreign_found": found}
