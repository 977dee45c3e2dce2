"""A seeded schedule of faults against a whole run: the invariants hold, and the result is the same to the bit."""

from pathlib import Path

import psutil
import pytest

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from rl.audit.invariants import check_run
from rl.runtime.node.orphans import find_orphans
from rl.runtime.node.warm import NAME
from tests.benches.recovery.compare import compare, make_undisturbed
from tests.benches.recovery.run import COMMAND, WatchedRun
from tests.chaos.experiments import calm
from tests.chaos.faults import ROLES, Fault, many, one_of_each, run_through
from tests.chaos.listeners import is_loopback, listeners

pytestmark = pytest.mark.timeout(1800)  # starts half a dozen processes many times: a busy machine needs long


def assert_survived(run: WatchedRun, tmp_path: Path, staleness: int = 0, *, like_skewed: bool = False) -> None:
    """Check that every invariant holds, and that every array and figure equals that of the undisturbed run.

    The trainer of that holds a copy of the reference itself.
    """
    findings = check_run(run.run_dir)
    assert [line for finding in findings for line in finding.broken] == []
    undisturbed = calm(run.step, staleness, like_skewed=like_skewed)
    outcome = compare(run.run_dir, make_undisturbed(tmp_path / "calm", undisturbed), run.step)
    assert outcome["arrays_compared"] > 10
    different = [name for name in outcome["arrays_different"] if not name.startswith("constant")]
    assert not different and not outcome["updates_different"], outcome
    assert outcome["bit_identical"] != like_skewed, outcome
    counts = {kind: run.count(kind) for kind in ("kill", "stop")}
    facts = sum(finding.checked for finding in findings)
    print(f"{run.step} updates; survived {counts}; {facts} facts about {len(findings)} invariants")


def assert_left_in_order(run: WatchedRun, target: str) -> None:
    """Check that a role that was asked to leave did so in time, handed its work over, and was not called dead."""
    asked = next(n for n, row in enumerate(run.events) if row["event"] == "leave" and row["target"] == target)
    back = next(n for n, row in enumerate(run.events) if n > asked and (row["event"], row["role"]) == ("start", target))
    between = run.events[asked:back]
    [left] = [row for row in between if row["event"] == "shutdown"]
    assert left["role"] == target and left["seconds"] < 25 and "abandoned" not in left
    assert [row for row in between if row["event"] == "died" and row["target"] == target] == []
    assert f"{target} (pid {left['pid']}) shut down on SIGTERM; restarting it" in run.said()
    if target == "trainer":
        before = [row["step"] for row in run.events[:back] if row["event"] == "update"]
        after = [row["step"] for row in run.events[back:] if row["event"] == "update"]
        assert after[0] == before[-1] + 1, "it saved: no update was repeated"


@pytest.mark.slow
def test_every_role_is_killed_and_some_are_stopped_while_connections_break_and_clocks_disagree(tmp_path) -> None:
    """Some are asked to leave, as by a preemption; and nothing listens beyond the loopback interface."""
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:skewed") as run:
        listening: set[tuple[str, int]] = set()

        def look() -> None:
            listening.update(listeners(run.pid(COMMAND)))
            roles = (*ROLES, "reference")
            parents = {role: psutil.Process(run.pid(role)).parent() for role in roles}
            assert {role: parent and parent.name() for role, parent in parents.items()} == dict.fromkeys(roles, NAME)
            assert find_orphans(RunDirectory.attach(run.run_dir)) == []

        run_through(run, one_of_each(seed=1), seed=1, look=look, updates=2)
        assert len(listening) > 5  # Ray's own, a port for every actor, and the parameter server
        assert [address for address in listening if not is_loopback(address[0])] == []
        for target in ("worker-1", "trainer"):
            assert_left_in_order(run, target)
        times = [row["time"] for row in run.events]
        assert max(times) - min(times) > 1800, "the clocks did disagree"
        assert_survived(run, tmp_path, like_skewed=True)
        rows = read_rows(run.run_dir / "metrics.jsonl")
        assert sum(row["pool/again_fraction"] > 0 for row in rows) > 3, "problems are drawn again"


@pytest.mark.full
@pytest.mark.parametrize(
    ("experiment", "staleness", "seed"),
    [("flaky", 0, 2), ("flaky", 0, 3), ("flaky_behind", 1, 4), ("flaky_behind", 1, 5), ("skewed", 0, 6)],
)
def test_many_faults(experiment: str, staleness: int, seed: int, tmp_path) -> None:
    with WatchedRun(tmp_path / "run", f"tests.chaos.experiments:{experiment}") as run:
        run_through(run, many(seed, count=24), seed)
        assert_survived(run, tmp_path, staleness, like_skewed=experiment == "skewed")


@pytest.mark.full
def test_a_worker_that_is_stopped_for_longer_than_its_lease_is_overtaken_and_its_rollouts_are_rejected(
    tmp_path,
) -> None:
    arguments = ("--set", "controller.lease_seconds=8")
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:flaky", arguments) as run:
        run_through(run, [Fault("stop", ("worker-0",), 20.0), Fault("stop", ("worker-1",), 20.0)])
        assert [row for row in run.events if row["event"] == "lease_expired"]
        assert_survived(run, tmp_path)


@pytest.mark.full
def test_many_faults_with_a_trainer_of_two_processes(tmp_path) -> None:
    """One invariant is that repeated versions have the same bits. (A single process sums in another order.)"""
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:trainer_group") as run:
        run_through(run, many(7, count=16, roles=(*ROLES, "trainer-1")), seed=7)
        assert run.count("update", "trainer") > run.step, "some updates were repeated"
        assert [line for finding in check_run(run.run_dir) for line in finding.broken] == []
