"""Each invariant holds of real runs and is found broken where a log says so; what a log does not tell is named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl.audit.invariants import check_run
from tests.rl.runtime.ray.experiments import run_here
from tests.rl.tiny import tiny_experiment

CONFIG = """rl.experiment:RLExperiment.Config
prompts_per_step: 4
groups_per_lease: 2
staleness: 0
workers: 2
trainer.checkpoint.save_every: 2
controller.weights: 'pinned'
"""
ORDER, LOST, WHOLE, ONCE, AGE, VERSIONS, DEATHS, WAITS = range(8)


class Log:
    """A run directory made by hand: a run of two leases an update, four tokens each."""

    def __init__(self, path: Path, config: str = CONFIG):
        self.path, self.now, self.lease = path, 1000.0, 0
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        (path / "config.txt").write_text(config)
        self.event("driver", "phase_begin", phase="rl")
        self.event("driver", "session", pid=1, group=1)

    def event(self, role: str, event: str, **fields: Any) -> None:
        self.now += 0.1
        self.events.append({"time": self.now, "role": role, "event": event, **fields})

    def start(self, role: str, pid: int, version: int = 0) -> None:
        """Log a start; for the trainer, with the version that it restores: rows beyond it go, as in a real run."""
        self.event(role, "start", pid=pid)
        if role == "trainer":
            self.event("trainer", "push", seconds=0.01, version=version, checksum=f"sum{version}")
            self.metrics = [row for row in self.metrics if row["step"] <= version]

    def update(self, step: int, *, leases: int = 2, age: int = 0) -> None:
        first = self.lease
        for _ in range(leases):
            self.event("worker-0", "generate", seconds=0.1, step=step, lease=self.lease, version=step - age, tokens=4)
            self.lease += 1
        self.event("trainer", "wait", seconds=0.2, step=step, **{"for": f"batch {step}"})
        self.event("trainer", "update", seconds=0.1, step=step)
        self.event("controller", "consumed", step=step, leases=[first, first + 1])
        self.event("trainer", "push", seconds=0.01, version=step + 1, checksum=f"sum{step + 1}")
        self.metrics.append({"phase": "rl", "step": step + 1, "gen_tokens": 8.0, "staleness_max": age})

    def broken(self) -> dict[int, Sequence[str]]:
        """Return what is broken, by the number of the invariant."""
        for name, rows in (("events", self.events), ("metrics", self.metrics)):
            (self.path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {i: finding.broken for i, finding in enumerate(check_run(self.path)) if finding.broken}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Three updates, then the trainer dies, restores step 2 and goes on."""
    made = Log(tmp_path)
    made.start("worker-0", 10)
    made.start("trainer", 11)
    for step in range(3):
        made.update(step)
    made.event("driver", "died", target="trainer")
    made.start("trainer", 12, version=2)
    for step in range(2, 5):
        made.update(step)
    return made


@pytest.mark.full  # in every run they are checked of such a run in tests/rl/runtime/test_inprocess.py
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_in_one_process_keeps_them_all(staleness: int, tmp_path: Path) -> None:
    findings = check_run(run_here(tmp_path, tiny_experiment(staleness=staleness)))
    assert [finding.broken for finding in findings] == [()] * len(findings)
    assert all(findings[i].checked for i in (ORDER, WHOLE, AGE, WAITS))


def test_a_step_made_again_after_a_restart_is_no_harm(log: Log) -> None:
    assert log.broken() == {}


def test_a_step_left_out_or_made_twice_by_one_incarnation_is_found(log: Log) -> None:
    log.update(6)
    assert "step 6 out of order" in log.broken()[ORDER][0]
    log.metrics.pop()
    log.update(4)
    assert any("does not hold the updates 1 to" in line for line in log.broken()[ORDER])


def test_a_trainer_that_begins_before_its_checkpoint_is_found(log: Log) -> None:
    log.event("trainer", "saved", step=4)
    log.event("driver", "died", target="trainer")
    log.start("trainer", 13, version=2)
    assert log.broken()[LOST] == ("trainer incarnation 2 began at step 2; step 4 was saved",)


def test_without_word_of_saves_the_config_gives_the_bound(log: Log) -> None:
    for step in range(5, 9):
        log.update(step)
    log.event("driver", "died", target="trainer")
    log.start("trainer", 13, version=2)
    assert log.broken()[LOST] == (
        "trainer incarnation 2 began at step 2; step 6 was saved",
    )  # 8 may have been under way


def test_an_incarnation_that_saves_nothing_is_judged_by_the_saves_of_others(log: Log) -> None:
    log.event("trainer", "saved", step=4)
    log.event("driver", "died", target="trainer")
    log.start("trainer", 13, version=4)
    log.update(4)
    log.event("driver", "died", target="trainer")
    log.start("trainer", 14, version=4)
    assert LOST not in log.broken()
    assert check_run(log.path)[LOST].unchecked == ""


def test_a_batch_of_one_lease_twice_is_found(log: Log) -> None:
    log.metrics[1]["gen_tokens"] = 4.0
    assert "step 1 consumed 4 tokens" in log.broken()[WHOLE][0]


def test_what_was_handed_back_counts_with_what_another_drew_to_it(log: Log) -> None:
    log.event("worker-0", "generate", seconds=0.1, step=5, lease=90, version=5, tokens=3)
    log.event("controller", "handed_back", lease=90, step=5, worker="worker-0", tokens=3)
    log.event("worker-0", "shutdown", pid=10)
    log.start("worker-0", 30)
    log.event("worker-0", "generate", seconds=0.1, step=5, lease=91, version=5, tokens=1)
    log.event("worker-0", "generate", seconds=0.1, step=5, lease=92, version=5, tokens=4)
    log.event("trainer", "update", seconds=0.1, step=5)
    log.metrics.append({"phase": "rl", "step": 6, "gen_tokens": 8.0, "staleness_max": 0})
    assert log.broken() == {}


def test_an_elastic_worker_may_go_for_good(log: Log) -> None:
    log.event("worker-7", "shutdown", pid=70)
    log.now += 1000
    log.start("worker-1", 20)
    assert log.broken() == {}


def test_a_lease_in_two_steps_is_found(log: Log) -> None:
    log.event("controller", "consumed", step=9, leases=[0, 77])
    assert log.broken()[ONCE] == (
        "lease 0 was consumed by step 0 and by step 9",
        "lease 0 of step 0 was consumed by step 9",
    )


def test_rollouts_that_are_too_old_are_found(log: Log) -> None:
    log.update(5, age=1)
    assert log.broken()[AGE][0] == "update 6 consumed rollouts of age 1; the bound is 0"


def test_a_version_with_two_meanings_is_found(log: Log) -> None:
    log.event("worker-0", "pull", seconds=0.1, version=3, checksum="other")
    assert "version 3: worker-0 saw other (pull), it was sum3 before" in log.broken()[VERSIONS]


def test_a_death_without_a_start_is_found_unless_the_run_was_ended(log: Log) -> None:
    log.event("driver", "died", target="worker-0")
    assert log.broken() == {}  # it may still come
    log.now += 1000
    log.start("worker-1", 20)
    assert log.broken()[DEATHS][0].startswith("worker-0 died at ")
    log.event("driver", "phase", phase="rl", seconds=1.0)
    assert DEATHS not in log.broken()


def test_a_trainer_that_does_nothing_for_long_is_found_unless_it_says_for_what_it_waits(log: Log) -> None:
    log.now += 1000
    log.event("trainer", "wait", seconds=1000.0, step=5, **{"for": "batch 5"})
    log.event("worker-0", "generate", seconds=1000.0, step=4, lease=99, version=4, tokens=4)
    assert log.broken() == {}
    log.now += 1000
    log.event("controller", "waiting", who="trainer", what="batch 5", seconds=30.0)
    log.event("controller", "waiting", who="worker-0", what="the trainer to begin", seconds=30.0)
    log.now += 1000
    log.update(5)
    assert log.broken() == {}
    log.now += 1000
    log.update(6)
    assert [line.partition(" s ")[0] for line in log.broken()[WAITS]] == [
        "worker-0: nothing for 1000",
        "trainer: nothing for 1000",
    ]


def test_what_the_log_does_not_tell_is_said(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.start("trainer", 11)
    log.update(0)
    log.events = [{k: v for k, v in row.items() if k != "checksum"} for row in log.events if row["event"] != "consumed"]
    log.start("verifier", 12)
    log.start("verifier", 13)
    assert log.broken() == {}
    said = [finding.unchecked for finding in check_run(tmp_path)]
    assert said[ONCE] == "the controller logs no event `consumed` (step, leases)"
    assert said[VERSIONS] == "2 events `push` and `pull` without a checksum"
    assert said[DEATHS] == "1 starts without an event `died` before them"


def test_clocks_that_disagree_do_not_break_anything(log: Log) -> None:
    for row in log.events:
        if row["role"] == "worker-0":
            row["time"] -= 3600
    assert log.broken() == {}
    assert "clocks of the roles disagree" in check_run(log.path)[WAITS].unchecked
