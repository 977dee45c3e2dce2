"""report.json from a made-up run whose figures can be worked out by hand."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.directory import RunDirectory
from rl.audit.summary import summarise_run


def row(step: int, time: float, seconds: float, **fields: Any) -> dict[str, Any]:
    base = {"phase": "rl", "step": step, "time": time, "step_seconds": seconds}
    counts = {"gen_tokens": 100.0, "train_tokens": 60.0, "staleness_mean": 0.5, "staleness_max": 1}
    return {**base, **counts, **fields}


def event(time: float, role: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "role": role, "event": name, **fields}


def write(path: Path, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> RunDirectory:
    run = RunDirectory.attach(path)
    run.metrics_path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    run.events_path.write_text("".join(json.dumps(e) + "\n" for e in events))
    return run


ROWS = [
    {"phase": "sft", "step": 1, "time": 1.0, "loss": 2.0},
    row(1, 10.0, 4.0, logprob_diff_mean=1e-7, logprob_diff_max=4e-7, staleness_mean=0.0, staleness_max=0),
    row(2, 11.0, 1.0),
    row(3, 12.0, 1.0, logprob_diff_mean=3e-7, logprob_diff_max=9e-7, staleness_mean=1.0, staleness_max=2),
    row(4, 14.5, 2.5, gen_tokens=50.0),
    row(5, 16.0, 1.5),
    row(6, 17.0, 1.0),
    row(7, 30.0, 2.0),
]
EVENTS = [
    event(5.0, "driver", "phase", phase="sft", seconds=3.0),
    event(6.0, "driver", "phase", phase="eval_before", seconds=0.5),
    event(9.0, "worker-0", "generate", seconds=2.0, tokens=100),
    event(9.5, "worker-1", "score", seconds=0.1),
    event(10.0, "trainer", "update", seconds=0.5),
    event(12.2, "driver", "phase", phase="rl", seconds=4.0),  # a first session
    event(12.5, "driver", "kill", target="worker-1", pid=77, step=3),
    event(12.6, "worker-1", "score", seconds=0.1),  # of the killed one, logged late: not its successor's
    event(12.9, "driver", "died", target="worker-0"),
    event(13.1, "driver", "died", target="worker-1"),
    event(14.0, "worker-0", "start", pid=5),
    event(14.2, "worker-1", "start", pid=78),
    event(14.4, "worker-0", "score", seconds=0.1),
    event(15.5, "worker-1", "score", seconds=0.1),
    event(15.6, "worker-1", "joined", join_s=1.75),
    event(16.0, "worker-0", "generate", seconds=3.0, tokens=400),
    event(16.5, "trainer", "update", seconds=1.5),
    event(18.0, "driver", "phase", phase="rl", seconds=6.0),  # and its resumption
]


def test_seconds_add_up_over_sessions(tmp_path: Path):
    report = summarise_run(write(tmp_path, ROWS, EVENTS), name="demo", seed=3)
    assert (report["name"], report["seed"]) == ("demo", 3)
    assert report["seconds"] == 13.5
    assert report["phase_seconds"] == {"sft": 3.0, "eval_before": 0.5, "rl": 10.0, "eval_after": 0}


def test_means_are_over_updates_and_comparisons_over_those_that_were_compared(tmp_path: Path):
    report = summarise_run(write(tmp_path, ROWS, EVENTS), name="demo", seed=3)
    assert report["staleness"] == {"mean": pytest.approx(3.5 / 7), "max": 2}
    assert report["logprob_diff"] == {"mean": pytest.approx(2e-7), "max": 9e-7}


def test_throughput(tmp_path: Path):
    report = summarise_run(write(tmp_path, ROWS, EVENTS), name="demo", seed=3)
    assert report["throughput"] == {
        "gen_tokens_per_second": pytest.approx(650 / 13),
        "updates_per_second": pytest.approx(7 / 13),
        "gen_tokens_per_worker_second": pytest.approx(500 / 5),
        "train_tokens_per_update_second": pytest.approx(7 * 60 / 2),
    }


def test_drafts_are_counted_where_there_were_any(tmp_path: Path):
    drafted = [event(17.0, "worker-0", "generate", seconds=1.0, tokens=100, drafted_tokens=80, accepted_tokens=60)]
    throughput = summarise_run(write(tmp_path, ROWS, EVENTS + drafted), name="demo", seed=3)["throughput"]
    assert (throughput["draft_acceptance"], throughput["accepted_share"]) == (60 / 80, 60 / 600)


def test_what_a_kill_cost(tmp_path: Path):
    """The median update before the kill took 1 s; the two affected by it took 2.5 and 1.5 s: two seconds lost.

    A kill affects the updates up to the first one after the successor's first rollout.
    """
    report = summarise_run(write(tmp_path, ROWS, EVENTS), name="demo", seed=3)
    (kill,) = report["kills"]
    assert kill == {
        "target": "worker-1",
        "pid": 77,
        "time": 12.5,
        "step": 3,
        "detected_s": pytest.approx(0.6),
        "started_s": pytest.approx(1.7),
        "replaced_s": pytest.approx(3.0),
        "lost_s": pytest.approx(2.0),
    }


def test_a_kill_whose_victim_never_came_back_has_no_made_up_figures(tmp_path: Path):
    events = [e for e in EVENTS if e["time"] <= 12.6]
    (kill,) = summarise_run(write(tmp_path, ROWS, events), name="demo", seed=3)["kills"]
    figures = [kill[name] for name in ("detected_s", "started_s", "replaced_s", "lost_s")]
    assert figures == [None, None, None, None]


def test_updates_that_were_faster_than_usual_are_no_loss(tmp_path: Path):
    rows = [r if r["time"] < 13 else {**r, "step_seconds": 0.5} for r in ROWS if r["phase"] == "rl"]
    (kill,) = summarise_run(write(tmp_path, rows, EVENTS), name="demo", seed=3)["kills"]
    assert kill["lost_s"] == 0.0


def test_evaluations_are_those_on_disk_and_absent_ones_stay_absent(tmp_path: Path):
    run = write(tmp_path, [r for r in ROWS if "logprob_diff_mean" not in r], EVENTS)
    (tmp_path / "eval_before.json").write_text('{"pass@1": 0.25}')
    report = summarise_run(run, name="demo", seed=3)
    assert report["before"] == {"pass@1": 0.25}
    assert "after" not in report and "logprob_diff" not in report
    assert report["versions"]["jax"] == importlib.metadata.version("jax")
    assert json.loads(json.dumps(report)) == report


def test_how_long_workers_took_to_join(tmp_path: Path):
    report = summarise_run(write(tmp_path, ROWS, EVENTS), name="run", seed=0)
    assert report["joins"] == [{"worker": "worker-1", "time": 15.6, "join_s": 1.75}]


def test_weights_are_told_by_push_transfer_wait_pause_and_age(tmp_path: Path):
    def pull(time: float, version: int, wait: float, transfer: float) -> dict[str, Any]:
        what = {"version": version, "nbytes": 1000, "network": 40, "transfer_seconds": transfer}
        return event(time, "worker-0", "pull", seconds=wait, **what)

    events = [
        *EVENTS,
        event(1.0, "trainer", "push", version=0, seconds=0.5),
        pull(2.0, 0, 0.3, 0.3),
        event(2.5, "worker-0", "swap", version=0, seconds=0.01),
        event(3.0, "trainer", "push", version=1, seconds=0.7),
        event(3.5, "worker-0", "pull", version=1, seconds=9.0, error="not published"),
        pull(4.0, 1, 0.1, 0.5),
        event(4.5, "worker-0", "swap", version=1, seconds=0.03),
    ]
    report = summarise_run(write(tmp_path, ROWS, events), name="demo", seed=3)
    assert report["weights"] == {
        "push": {"median": 0.6, "max": 0.7},
        "transfer": {"median": 0.4, "max": 0.5},
        "wait": {"median": 0.2, "max": 0.3},
        "pause": {"median": 0.02, "max": 0.03},
        "age": {"median": 1.5, "max": 1.5},
        "pulled_bytes": 2000,
        "network_bytes": 80,
    }
