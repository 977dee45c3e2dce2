"""Faults in one of two equal runs are located: update, event, array, element."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from rl.protocol.messages import Score
from rl.runtime.replay.bisect import Located, Tracer, bisect, config_differences, first_unequal
from rl.runtime.replay.record import RunRecord
from rl.runtime.replay.update import Replay, replay
from tests.benches.recovery.injected_faults import benchmark, faults
from tests.rl.runtime.ray.experiments import run_here
from tests.rl.runtime.replay.test_replay import edited, five

Q = "layers/attention/q_dkqh"
PLACE = (0, 5, 0, 1, 3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return RunRecord(run_here(tmp_path_factory.mktemp("bisect") / "plain", five()))


def again(record: RunRecord) -> Tracer:
    return lambda update, since: replay(record, update, since=since, deep=True)


def located(plain: RunRecord, path: Path, fault: Any, *, passing: bool = False) -> tuple[Located, RunRecord]:
    """Run with a fault at update 3, and locate it."""
    with fault(3):
        other = RunRecord(run_here(path, five()))

    def trace(update: int, since: int) -> Replay:
        with contextlib.nullcontext() if passing else fault(3):
            return again(other)(update, since)

    found = bisect(plain, other, again(plain), trace)
    assert found is not None
    return found, other


@pytest.mark.slow
def test_an_ulp_in_a_layer_is_located_in_its_array(plain: RunRecord, tmp_path: Path) -> None:
    found, other = located(plain, tmp_path / "run", faults.flipped_ulp(f"params/{Q}", PLACE))
    assert (found.update, found.event, found.array, found.index) == (3, "weights", Q, PLACE)
    assert (found.ulps, found.layer, found.stray) == (1, "layer 0", {})
    assert [one.stage for one in found.stages] == ["weights"]
    assert config_differences(plain, other) == {}
    same = first_unequal(plain, plain)
    assert same is None


@pytest.mark.slow
def test_a_fault_that_has_passed_is_located_by_the_record(plain: RunRecord, tmp_path: Path) -> None:
    found, _ = located(plain, tmp_path / "run", faults.flipped_ulp(f"params/{Q}", PLACE), passing=True)
    assert (found.update, found.event, found.array) == (3, "weights", Q)
    assert "The record of B is not what its update gives" in found.said


@pytest.mark.slow
def test_a_reward_is_located_by_prompt_and_sample(plain: RunRecord, tmp_path: Path) -> None:
    fault = faults.changed_groups(faults.score_change(1, Score(1.0)))
    found, _ = located(plain, tmp_path / "run", fault)
    assert (found.update, found.event, found.sides[1]) == (3, "reward", "1")
    assert found.array.endswith(":1") and found.said.startswith(f"{found.array}: the reward is ")
    stages = [one.stage for one in found.stages]
    assert stages[0] == "reward" and stages[-1] == "weights" and "tokens" not in stages


@pytest.mark.full
def test_another_seed_is_located_at_its_first_token(plain: RunRecord, tmp_path: Path) -> None:
    found, _ = located(plain, tmp_path / "run", faults.other_seed)
    assert (found.update, found.event) == (3, "tokens") and found.layer is None  # the same activations up to it
    assert f"token {found.index[0]} is {found.sides[0]} (" in found.said


@pytest.mark.full
def test_versions_without_a_record_are_made_again_on_the_way(plain: RunRecord, tmp_path: Path) -> None:
    """The other run's log lacks all of updates 3 and 4, and its first recorded difference is at 5."""
    fault = faults.flipped_ulp(f"params/{Q}", PLACE)
    with fault(3):
        run_here(tmp_path / "run", five())

    def forget(row: dict[str, Any]) -> None:
        if row["event"] in ("push", "update") and {row.get("version"), row.get("step", -2) + 1} & {3, 4}:
            row["event"] = "lost"

    def forgotten(row: dict[str, Any]) -> None:
        if row["step"] in (3, 4):
            row["phase"] = "lost"

    edited(tmp_path / "run", tmp_path / "events", "events.jsonl", forget)
    other = edited(tmp_path / "events", tmp_path / "both", "metrics.jsonl", forgotten)
    unequal = first_unequal(plain, other)
    assert unequal is not None and unequal[0] == 5
    calls: list[tuple[int, int]] = []

    def trace(update: int, since: int) -> Replay:
        calls.append((update, since))
        with fault(3):
            return again(other)(update, since)

    found = bisect(plain, other, again(plain), trace)
    assert found is not None and (found.update, found.event, found.index) == (3, "weights", PLACE)
    assert calls == [(5, 2), (3, 2)]


@pytest.mark.full
def test_every_fault_of_the_benchmark_is_located() -> None:
    found = benchmark.run(print)
    assert [name for name, one in found["cases"].items() if not one["located"]] == []
    assert found["located"] == found["faults"] >= 20
