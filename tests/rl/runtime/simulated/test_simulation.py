"""Simulated runs: times worked out by hand, repeats, failures, and the same rollouts whatever is killed."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.failures import Failure
from rl.runtime.simulated.lengths import read_lengths
from rl.runtime.simulated.result import ettr, summarise
from rl.runtime.simulated.simulation import Simulation, SimulationPlan, simulate
from tests.rl.tiny import tiny_experiment

BY_HAND: dict[str, Any] = {"decode_step": 1.0, "score": 0.5, "update": 3.0, "start_worker": 5.0, "start_trainer": 5.0}


def plan(steps: int = 6, failures: Sequence[Failure] = (), lengths: str = "fixed:5", **changes: Any) -> SimulationPlan:
    """Return a plan of 4 prompts x 4 samples an update, in two leases of 8 rollouts."""
    fields = {"num_steps": steps, "evaluation": None, "workers": 1, **changes}
    durations = Durations(**{**BY_HAND, **fields.pop("durations", {})})
    cfg = tiny_experiment(**fields)
    return SimulationPlan(cfg, durations, read_lengths(lengths, cfg.max_new_tokens), failures=failures)


def run(tmp_path: Path, one: SimulationPlan, name: str = "run") -> Simulation:
    return simulate(one, tmp_path / name)


def period(simulation: Simulation) -> float:
    """Return the seconds of the last update."""
    times = [row["time"] for row in simulation.trainer_log.rows]
    return times[-1] - times[-2]


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 2 * (5 + 4) + 3),  # two leases one after the other, 5 steps and 8 answers at half a second; the update
        ({"workers": 2}, 5 + 8 + 3),  # the leases side by side, their answers share the verifier
        ({"workers": 2, "durations": {"verifiers": 2.0}}, 5 + 4 + 3),
        ({"workers": 2, "durations": {"verifiers": 2.0, "cores": 1.0}}, 10 + 8 + 3),  # all on one core
        ({"staleness": 1}, 2 * (5 + 4)),  # the update is hidden
        ({"staleness": 1, "durations": {"update": 30.0}}, 30),  # the drawing is
        ({"durations": {"decode_row": 0.125, "decode_context": 0.0}}, 2 * (5 * 2 + 4) + 3),  # 8 rows
        ({"durations": {"update_rest": 2.0, "score": 0.0}}, 10 + 3 + 2 - 2),  # hidden by the drawing
    ],
)
def test_an_update_takes_the_seconds_worked_out_by_hand(tmp_path: Path, changes: dict[str, Any], seconds: float):
    assert abs(period(run(tmp_path, plan(**changes))) - seconds) < 0.05


def test_a_run_repeats_and_its_directory_reads_like_a_real_ones(tmp_path: Path):
    one, other = (run(tmp_path, plan(lengths="lognormal:3,0.5", workers=3, staleness=1), n) for n in "ab")
    assert one.events.rows == other.events.rows and one.trainer_log.rows == other.trainer_log.rows
    rows = read_rows(tmp_path / "a" / "events.jsonl")
    assert {row["event"] for row in rows} >= {"start", "generate", "pull", "swap", "score", "push", "wait", "update"}
    assert [row["step"] for row in read_rows(tmp_path / "a" / "metrics.jsonl")] == list(range(1, 7))
    found = summarise(one)
    assert found["updates"] == 6 and found["finished"] and sum(found["staleness"].values()) == pytest.approx(1.0)
    assert json.dumps(found)
    with pytest.raises(UserError, match="has a run already"):
        run(tmp_path, plan(), "a")


def drawn(path: Path) -> dict[int, bytes]:
    """Return the names and digests of the rollouts of each update; of one made again, the last."""
    return {row["step"]: base64.b64decode(row["data"]) for row in read_rows(path / "ledger.jsonl")}


@pytest.mark.parametrize(
    ("target", "seconds"),
    [
        ("trainer", 10.0),
        ("controller", 2.0),
        ("driver", -1.0),
        ("raylet", 10.0),
        ("worker-0", -1.0),
    ],  # the verifier has work while a worker is away
)
def test_a_kill_costs_time_and_changes_no_rollout(tmp_path: Path, target: str, seconds: float):
    known: dict[str, Any] = {"lengths": "lognormal:3,0.5", "workers": 2, "staleness": 1, "steps": 9}
    calm = run(tmp_path, plan(**known), "calm")
    killed = run(tmp_path, plan(failures=[Failure(47.0, target), Failure(90.0, target)], **known), "killed")
    assert killed.finished and killed.clock() > calm.clock() + seconds
    before, after = drawn(tmp_path / "calm"), drawn(tmp_path / "killed")
    assert len(before) == 9 and after == before
    assert sum(row["event"] == "kill" for row in killed.events.rows) == 2
    redone = summarise(killed)["updates_redone"]
    assert redone > 0 if target in ("trainer", "raylet") else redone == 0
    assert target != "driver" or killed.clock() == calm.clock(), "the roles work on"
    ratio = ettr(killed)
    assert 0.3 < ratio["ettr"] < 1.02 and ratio["ettr_interval"][0] <= ratio["ettr"] <= ratio["ettr_interval"][1] + 0.2


def test_the_real_supervisor_releases_leases_restarts_and_gives_up_by_the_virtual_clock(tmp_path: Path):
    found = run(tmp_path, plan(workers=2, failures=[Failure(7.0, "worker-1"), Failure(20.0, "raylet")]))
    began = found.clock.wall() - found.clock()
    rows = [(round(row["time"] - began, 2), row["event"], row["role"], row.get("target")) for row in found.events.rows]
    assert (7.25, "died", "driver", "worker-1") in rows and (12.25, "start", "worker-1", None) in rows
    expired = [row for row in found.events.rows if row["event"] == "lease_expired"]
    assert expired[0]["reason"] == "worker died" and round(expired[0]["time"] - began, 2) == 7.25
    # One death after the other, a pause between them.
    assert [row[0] for row in rows if row[1] == "died" and row[0] > 20] == [20.25, 20.35, 20.45]
    failures = [Failure(7.0 + 6 * n, "worker-1") for n in range(5)]
    with pytest.raises(UserError, match="worker-1 died 5 times without an update in between, at update 0"):
        run(tmp_path, plan(workers=2, durations={"update": 90.0, "decode_step": 9.0}, failures=failures), "too-many")


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [
        ([], 5 + 3),
        ([Failure(30.0, "worker-1", "gone")], 2 * 5 + 3),  # one worker alone
        ([Failure(30.0, "worker-1", "gone"), Failure(60.0, "worker-1", "back")], 5 + 3),
        ([Failure(30.0, "worker-1", "slow", 3.0)], 3 * 5 + 3),
    ],
)
def test_capacity_that_goes_and_a_slow_host(tmp_path: Path, failures: list[Failure], seconds: float):
    found = run(tmp_path, plan(workers=2, steps=12, durations={"score": 0.0}, failures=failures))
    assert abs(period(found) - seconds) < 0.05


def test_a_host_that_goes_while_its_worker_starts_takes_the_start_with_it(tmp_path: Path):
    kinds: Sequence[Any] = ("gone", "back", "gone", "back")
    failures = [Failure(30.0 + n, "worker-1", kind) for n, kind in enumerate(kinds)]
    found = run(tmp_path, plan(workers=2, steps=6, failures=failures))
    began = found.clock.wall() - found.clock()
    starts = [row["time"] - began for row in found.events.rows if row["event"] == "start" and row["role"] == "worker-1"]
    assert starts == [0.0, 38.0]  # 5 s after it was back for good


def test_workers_read_from_peers_when_the_server_sends_one_copy_at_a_time(tmp_path: Path):
    sizes: dict[str, Any] = {"weights_bytes": 100.0, "server_network": 10.0, "worker_network": 10.0, "score": 0.0}
    found = run(tmp_path, plan(workers=4, groups_per_lease=1, durations=sizes))
    pulls = [row for row in found.events.rows if row["event"] == "pull" and row["version"] == 4]
    assert sorted(row["source"] for row in pulls) == ["server", "worker", "worker", "worker"]
    assert abs(period(found) - (10 + 10 + 20 + 5 + 3)) < 15  # push, first copy, two from it at half the rate each


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers: expected 1 or more, to simulate, got 0"),
        ({"failures": [Failure(1.0, "worker-7")]}, "no 'worker-7'; expected worker-0 to worker-0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        run(tmp_path, plan(**changes))
