"""report.json: the figures of a finished run, from what its roles wrote down."""

import importlib.metadata
import json
import statistics
from typing import Any

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from rl.audit.alarms import raised_alarms
from rl.audit.records import read_settings
from rl.tasks.skipped import SkippedProblems, skipped_path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "ray", "reasoning-gym")
PHASES = ("sft", "eval_before", "rl", "eval_after")


def summarise_run(run: RunDirectory, *, name: str, seed: int) -> dict[str, Any]:
    """Summarise a run, from evaluations to versions; `joins`: seconds of each worker's start to accepted rollouts."""
    events = read_rows(run.events_path)
    rows = [row for row in read_rows(run.metrics_path) if row["phase"] == "rl"]
    seconds = {phase: _phase_seconds(events, phase) for phase in PHASES}
    report: dict[str, Any] = {"name": name, "seed": seed}
    report["seconds"], report["phase_seconds"] = round(sum(seconds.values()), 3), seconds
    for when in ("before", "after"):
        path = run.path / f"eval_{when}.json"
        if path.exists():
            report[when] = json.loads(path.read_text())
    report["kills"] = [_kill(event, events, rows) for event in events if event["event"] == "kill"]
    report["joins"] = [
        {"worker": event["role"], "time": event["time"], "join_s": event["join_s"]}
        for event in events
        if event["event"] == "joined"
    ]
    report["throughput"] = _throughput(rows, events)
    report["weights"] = _weights(events)
    report["staleness"] = {
        "mean": statistics.fmean(row["staleness_mean"] for row in rows),
        "max": max(row["staleness_max"] for row in rows),
    }
    for name in ("logprob_diff", "scoring_diff"):
        if compared := [row for row in rows if f"{name}_mean" in row]:
            report[name] = {
                "mean": statistics.fmean(row[f"{name}_mean"] for row in compared),
                "max": max(row[f"{name}_max"] for row in compared),
            }
    if skipped := SkippedProblems(skipped_path(run.path)).counts():
        report["skipped"] = skipped  # problems by family and reason
    report["alarms"] = raised_alarms(rows, read_settings(run))
    report["versions"] = {package: _version(package) for package in PACKAGES}
    return report


def _phase_seconds(events: list[dict[str, Any]], phase: str) -> float:
    spans = (e["seconds"] for e in events if e["event"] == "phase" and e["phase"] == phase)
    return round(sum(spans), 3)


def _throughput(rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, float]:
    wall = sum(row["step_seconds"] for row in rows)
    generating = sum(e["seconds"] for e in events if e["event"] == "generate")
    updating = sum(e["seconds"] for e in events if e["event"] == "update")
    generated, drafted, accepted = (
        sum(e.get(name, 0) for e in events if e["event"] == "generate")
        for name in ("tokens", "drafted_tokens", "accepted_tokens")
    )
    drafts = {"draft_acceptance": accepted / drafted, "accepted_share": accepted / generated} if drafted else {}
    return {
        "gen_tokens_per_second": sum(row["gen_tokens"] for row in rows) / wall,
        "updates_per_second": len(rows) / wall,
        "gen_tokens_per_worker_second": generated / generating if generating else 0.0,
        "train_tokens_per_update_second": sum(row["train_tokens"] for row in rows) / updating if updating else 0.0,
        **drafts,
    }


def _weights(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median and maximum of each phase of a weight transfer, in seconds.

    `push` until published; `transfer` to a worker's devices, most of it while it generates; `wait`, the part that
    blocked it; `pause` of the swap; `age` of a version when it is swapped in, since its publication.
    """
    published = {e["version"]: e["time"] for e in events if e["event"] == "push"}  # last push of versions made twice
    swaps = [e for e in events if e["event"] == "swap"]
    pulls = [e for e in events if e["event"] == "pull" and "error" not in e]
    seconds = {
        "push": [e["seconds"] for e in events if e["event"] == "push"],
        "transfer": [e["transfer_seconds"] for e in pulls],
        "wait": [e["seconds"] for e in pulls],
        "pause": [e["seconds"] for e in swaps],
        "age": [max(0.0, e["time"] - published[e["version"]]) for e in swaps if e["version"] in published],
    }
    figures: dict[str, Any] = {
        name: {"median": round(statistics.median(values), 4), "max": round(max(values), 4)}
        for name, values in seconds.items()
        if values
    }
    moved = {name: sum(e[name] for e in pulls) for name in ("nbytes", "network")}
    return {**figures, "pulled_bytes": moved["nbytes"], "network_bytes": moved["network"]}


def _kill(kill: dict[str, Any], events: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the cost of one kill.

    `detected_s`: until its loop was seen to have ended; `replaced_s`: until its successor handed in a first rollout;
    `lost_s`: by how much the updates in that time were slower than the median of the twenty before.
    """
    at, target = kill["time"], kill["target"]
    later = [event for event in events if event["time"] > at]
    detected = next((e["time"] for e in later if e["event"] == "died" and e.get("target") == target), None)
    started = next((e["time"] for e in later if e["event"] == "start" and e["role"] == target), None)
    replaced = next(
        (
            e["time"]
            for e in later
            if started is not None and e["event"] == "score" and e["role"] == target and e["time"] > started
        ),
        None,
    )
    before = [row["step_seconds"] for row in rows if row["time"] <= at][-20:]
    lost = None
    if before and replaced is not None:
        usual = statistics.median(before)
        during = [row["step_seconds"] for row in rows if at < row["time"] <= replaced + usual]
        lost = round(max(0.0, sum(during) - usual * len(during)), 3)
    return {
        "target": target,
        "pid": kill["pid"],
        "time": at,
        "step": kill["step"],
        "detected_s": _since(at, detected),
        "started_s": _since(at, started),
        "replaced_s": _since(at, replaced),
        "lost_s": lost,
    }


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 3)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
