"""The arithmetic of the recovery benchmark on logs made by hand, its schedule, its comparison."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh import UserError
from tests.benches.recovery import benchmark as bench
from tests.benches.recovery.compare import compare
from tests.benches.recovery.figures import recoveries, seconds_by_role
from tools.cli import EXIT_USER_ERROR, main


def row(time: float, role: str, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "role": role, "event": event, **fields}


def kill(time: float, target: str, *, saved: int = 0, step: int = 0) -> dict[str, Any]:
    return row(time, "chaos", "kill", target=target, pid=1, step=step, saved=saved)


def update(time: float, step: int) -> dict[str, Any]:
    return row(time, "trainer", "update", step=step, seconds=0.1)


def generate(time: float, step: int, tokens: int = 5) -> dict[str, Any]:
    return row(time, "worker-0", "generate", step=step, tokens=tokens, seconds=0.1)


def test_a_killed_helper_is_counted_until_the_next_update_and_the_longest_gap_until_it_is_back() -> None:
    events = [
        update(10, 0),
        kill(11, "verifier"),
        update(12, 1),  # its batch was scored before
        row(18, "verifier", "start", pid=2),
        row(18.1, "chaos", "back", target="verifier", cpu=2.5),
        update(20, 2),
        kill(30, "controller"),
    ]
    first, second = recoveries(events)
    assert (first.update_s, first.back_s, first.gap_s, first.back_cpu_s) == (1.0, 7.0, 8.0, 2.5)
    assert (second.update_s, second.back_s, second.gap_s) == (None, None, None)
    assert seconds_by_role([first, second], "back_s") == {"verifier": {"median": 7.0, "worst": 7.0}}


def test_a_killed_elastic_worker_is_counted_until_another_has_its_lease() -> None:
    taken = row(13, "controller", "lease_expired", lease=1, step=1, worker="elastic-0", reason="worker silent")
    other = {**taken, "time": 11.5, "worker": "worker-0"}
    [recovery] = recoveries([update(10, 0), kill(11, "elastic-0"), other, taken, update(14, 1)])
    assert (recovery.update_s, recovery.back_s, recovery.gap_s) == (3.0, 2.0, 4.0)
    assert seconds_by_role([recovery], "back_s") == {"elastic": {"median": 2.0, "worst": 2.0}}


def test_after_a_killed_trainer_only_its_successor_counts_and_what_it_makes_again_is_told() -> None:
    events = [
        *(event for step in range(7) for event in (generate(step, step), generate(step, step), update(step, step))),
        kill(7, "trainer", saved=5),
        update(7, 7),  # a last word
        row(12, "trainer", "start", pid=2),
        *(event for step in (5, 6) for event in (generate(13, step), generate(13, step), update(14 + step, step))),
    ]
    [recovery] = recoveries(events)
    assert (recovery.update_s, recovery.redone, recovery.lost) == (12.0, 3, 0)
    [worse] = recoveries([{**e, "saved": 6} if e["event"] == "kill" else e for e in events])
    assert worse.lost == 1, "a checkpoint of 6 was on disk, and it began at 5"


def test_a_killed_command_is_back_with_its_next_session() -> None:
    events = [
        update(1, 0),
        kill(2, "command"),
        row(5, "driver", "session", pid=3),
        row(9, "trainer", "start", pid=4),
        update(11, 0),
    ]
    [recovery] = recoveries(events)
    assert (recovery.back_s, recovery.update_s, recovery.gap_s, recovery.redone) == (3.0, 9.0, 10.0, 1)


def test_a_killed_driver_takes_no_role_with_it_and_a_killed_raylet_those_that_it_started() -> None:
    events = [
        update(1, 0),
        kill(2, "driver"),
        update(2.3, 1),
        row(2.4, "driver", "session", pid=3),
        update(3, 2),
        kill(4, "raylet"),
        row(4.2, "driver", "session", pid=3),
        row(9, "trainer", "start", pid=4),
        row(9.5, "chaos", "back", target="raylet", cpu=1.0),
        update(11, 2),
        kill(12, "raylet"),
        update(12.1, 3),
        row(14, "chaos", "back", target="raylet", cpu=1.0),
        update(15, 4),
    ]
    driver, raylet, other = recoveries(events)
    assert (driver.back_s, driver.update_s, driver.redone) == (0.4, 0.3, 0)
    assert (raylet.back_s, raylet.update_s, raylet.redone) == (5.5, 7.0, 1)
    assert (other.back_s, other.update_s, other.gap_s, other.redone) == (2.0, 0.1, 2.9, 0), "with the services alone"


def test_a_step_updated_twice_by_one_incarnation_is_double_and_by_the_next_is_not() -> None:
    start = row(3, "trainer", "start", pid=2)
    assert bench.double_consumed([update(1, 0), update(2, 1), start, update(4, 1)]) == 0
    assert bench.double_consumed([update(1, 0), update(2, 1), update(4, 1)]) == 1


def test_every_role_has_its_turn_before_any_has_a_second_and_workers_take_turns() -> None:
    order = bench.schedule(bench.Kills(3, bench.ROLES, seed=1))
    assert len(order) == 30
    for begin in (0, 10, 20):
        assert len({name.rstrip("-012") for name in order[begin : begin + 10]}) == 10
    assert sorted(name for name in order if name.startswith("elastic-s")) == [f"elastic-stopped-{n}" for n in range(3)]
    assert [name for name in order if name.startswith("worker")] == ["worker-0", "worker-1", "worker-0"]
    again, other = (bench.schedule(bench.Kills(3, bench.ROLES, seed=seed)) for seed in (1, 2))
    assert order == again != other


def test_an_unknown_role_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no role 'trainr'.*trainer"):
        bench.find_roles(["trainr"])
    assert bench.find_roles([]) == list(bench.ROLES)
    assert main(["bench", "recovery", "--roles", "nobody"]) == EXIT_USER_ERROR
    assert "no role 'nobody'" in capsys.readouterr().err


def test_one_array_or_one_figure_that_differs_is_named(tmp_path: Path) -> None:
    def run(name: str, checksum: str, loss: float) -> Path:
        folder = tmp_path / name / "checkpoints" / "rl" / "2" / "manifest"
        folder.mkdir(parents=True)
        arrays = {"params": {"['w']": {"checksum": checksum}}, "rest": {"['mu']": {"checksum": "m"}}}
        (folder / "metadata").write_text(json.dumps(arrays))
        rows = [{"phase": "rl", "step": step, "time": len(name), "loss": loss} for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return tmp_path / name

    calm = run("calm", "a", 0.5)
    assert compare(run("the same", "a", 0.5), calm, 2)["bit_identical"]
    outcome = compare(run("other", "b", 0.25), calm, 2)
    assert not outcome["bit_identical"]
    assert outcome["arrays_different"] == ["params['w']"] and outcome["updates_different"] == [1, 2]


def test_success_is_every_kill_recovered_and_nothing_lost_doubled_or_changed() -> None:
    good = {"each": [{"update_s": 1.0, "back_s": 1.0}], "bit_identical": True, "lost_steps": 0, "double_consumed": 0}
    assert bench.succeeded(good)
    for change in ({"bit_identical": False}, {"lost_steps": 1}, {"double_consumed": 1}):
        assert not bench.succeeded({**good, **change})
    assert not bench.succeeded({**good, "each": [{"update_s": None, "back_s": 1.0}]})
