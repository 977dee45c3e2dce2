"""Elastic workers that are killed, stopped or cut off while they hold a lease: nobody waits for them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.audit.invariants import check_run
from tests.benches.recovery.compare import compare, make_undisturbed
from tests.benches.recovery.figures import recoveries
from tests.benches.recovery.run import COMMAND, PATIENCE_S, ROOT, WatchedRun
from tests.chaos.experiments import calm
from tests.chaos.held_server import read_began
from tests.chaos.hosts import ENVIRON, Hosts, permitted, ray_node

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_killed_or_stopped_with_a_lease_an_elastic_worker_holds_nobody_up(tmp_path: Path) -> None:
    """The stopped one continues later: what it still submits is rejected, and it works on."""
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:endless", ("--set", "workers=1")) as run:
        run.start()
        run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
        run.join("killed")
        run.lose("killed", signal.SIGKILL)
        run.join("stopped")
        run.lose("stopped", signal.SIGSTOP)
        scored = run.count("score", "stopped")
        assert run.signal("stopped", signal.SIGCONT, "continue")
        run.wait_for("later rollouts of the stopped worker", lambda: run.count("score", "stopped") > scored + 1, 60.0)
        assert run.stop() == 0, run.said()
        assert_equal_and_prompt(run, tmp_path, ["killed", "stopped"])


def test_killed_in_the_middle_of_a_pull_it_keeps_no_source_from_others(tmp_path: Path) -> None:
    """One reader takes a version from the server, the others from that; the grant of a dead one lasts 30 s."""
    hold = tmp_path / "hold"
    fields = (f"parameter_server.hold={hold}", "parameter_server.shared_memory=false", "workers=1")
    arguments = [word for field in fields for word in ("--set", field)]
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:held", arguments) as run:
        run.start()
        run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
        run.join("reader")
        assert run.signal("worker-0", signal.SIGSTOP, "stop")
        time.sleep(0.5)  # what it had sent has been answered
        hold.touch()
        run.wait_for("a read of the next version", lambda: read_began(hold).exists(), PATIENCE_S)
        assert run.signal("reader", signal.SIGKILL, "kill", saved=run.saved())
        hold.unlink()
        assert run.signal("worker-0", signal.SIGCONT, "continue")
        run.wait_for_update("an update without the reader")
        assert run.stop() == 0, run.said()
        assert_equal_and_prompt(run, tmp_path, ["reader"])


@pytest.mark.skipif(not permitted(), reason="network namespaces are not permitted here")
def test_cut_off_with_a_lease_on_another_host_it_holds_nobody_up(tmp_path: Path) -> None:
    arguments = ("--set", "parameter_server.host=0.0.0.0", "--set", "workers=1")
    with Hosts(2) as hosts, ray_node(hosts, 1) as address:
        environ = {**ENVIRON, "RAY_ADDRESS": address, "AXL_RAY_NODES": "1"}
        experiment = "tests.chaos.experiments:endless"
        with WatchedRun(tmp_path / "run", experiment, arguments, environ=environ, wrap=hosts.on(1)) as run:
            run.start()
            run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
            with ray_node(hosts, 2):
                run.join("far", hosts.on(2))
                run.freeze_with_lease("far")
                hosts.pull(2)
                assert run.signal("far", signal.SIGCONT, "kill", saved=run.saved())
                run.wait_for_lost_lease("far")
                run.wait_for_update("an update without the far worker")
                hosts.plug(2)
                run.wait_for_update("an update after that")
                assert run.stop() == 0, run.said()
            assert_equal_and_prompt(run, tmp_path, ["far"])


def test_without_its_driver_it_ends_and_none_can_join(tmp_path: Path) -> None:
    """Ray itself would end it after a minute, and would look for its cluster for minutes."""
    with WatchedRun(tmp_path / "run", "tests.chaos.experiments:endless", ("--set", "workers=1")) as run:
        run.start()
        run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
        run.join("left")
        assert run.signal(COMMAND, signal.SIGKILL, "kill", saved=run.saved())
        assert run.wait_for_worker(30.0) == 2
        lost = f"axl: error: the run in {run.run_dir} has lost its driver; resume it with `axl rl`, then join\n"
        assert run.said().endswith(lost) and "Traceback" not in run.said()
        assert (run.run_dir / "cluster.json").exists()
        command = [sys.executable, "-m", "tools.cli", "worker", str(run.run_dir)]
        late = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (late.returncode, late.stderr) == (2, lost)


def assert_equal_and_prompt(run: WatchedRun, tmp_path: Path, lost: list[str]) -> None:
    """Check that updates went on within seconds of each loss, and that the run is equal to a calm one to the bit."""
    found = recoveries(run.events)
    assert [recovery.target for recovery in found] == lost
    for recovery in found:
        assert recovery.update_s is not None and recovery.update_s < 20, "5 s on an idle machine; a lease lives 120 s"
        said = f"{recovery.target} is silent (killed, stopped or cut off?); its work goes to others\n"
        assert run.said().count(said) == 1
    assert [line for finding in check_run(run.run_dir) for line in finding.broken] == []
    outcome = compare(run.run_dir, make_undisturbed(tmp_path / "calm", calm(run.step)), run.step)
    assert outcome["bit_identical"], outcome
