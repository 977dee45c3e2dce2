"""A run over several hosts with networks of their own, which are cut off one after another."""

import contextlib

import psutil
import pytest

from rl.audit.invariants import check_run
from tests.benches.recovery.compare import compare, make_undisturbed
from tests.benches.recovery.run import DRIVER, WatchedRun
from tests.chaos.experiments import calm
from tests.chaos.hosts import ENVIRON, Hosts, permitted, ray_node

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not permitted(), reason="network namespaces are not permitted here"),
]

TIMEOUT = 300.0  # seconds


def test_hosts_are_cut_off_one_after_another_and_the_run_continues_without_them(tmp_path) -> None:
    arguments = ("--set", "parameter_server.host=0.0.0.0", "--set", "workers=3")
    with Hosts(3) as hosts, contextlib.ExitStack() as nodes:
        address = [nodes.enter_context(ray_node(hosts, number)) for number in (1, 2, 3)][0]
        environ = {**ENVIRON, "RAY_ADDRESS": address, "AXL_RAY_NODES": "3"}  # a busy machine's nodes come late
        experiment = "tests.chaos.experiments:endless"
        with WatchedRun(tmp_path / "run", experiment, arguments, environ=environ, wrap=hosts.on(1)) as run:
            run.start()
            run.wait_for("five updates", lambda: run.step >= 5, TIMEOUT)
            lost = [role for number in (2, 3) for role in _cut_off(number, hosts, run)]
            assert any(role.startswith("worker-") for role in lost), "workers are spread"
            assert run.stop() == 0
            assert [line for finding in check_run(run.run_dir) for line in finding.broken] == []
            outcome = compare(run.run_dir, make_undisturbed(tmp_path / "calm", calm(run.step)), run.step)
            assert outcome["bit_identical"], outcome


def _cut_off(number: int, hosts: Hosts, run: WatchedRun) -> list[str]:
    """Cut off a host: its roles start on other hosts, and have ended there when it is connected again.

    Returns:
        Its roles. A busy machine's Ray may place one elsewhere than it was asked to, so there may be none.
    """
    run.look()
    there = {role: run.pid(role) for role in run.roles() if role != DRIVER and hosts.holds(number, run.pid(role))}
    starts = {role: run.count("start", role) for role in there}
    run.note("cut", target=f"host {number}", roles=sorted(there))
    hosts.pull(number)
    for role in there:
        run.wait_for(f"{role} on another host", lambda r=role: run.count("start", r) > starts[r], TIMEOUT)
    run.wait_for_update("an update without the lost host")
    hosts.plug(number)
    gone = lambda: not any(map(psutil.pid_exists, there.values()))  # noqa: E731
    run.wait_for("the end of the roles on the lost host", gone, TIMEOUT)
    run.wait_for_update("an update after that")
    return sorted(there)
