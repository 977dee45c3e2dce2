"""Every role in a process of its own, as Ray actors; Ray is started inside the command unless a cluster is named."""

import os
from collections.abc import Callable

import ray

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.ray.elastic_workers import withdraw
from rl.runtime.ray.fault_injection import Say
from rl.runtime.ray.orphans import end_orphans
from rl.runtime.ray.preflight import check_reachable
from rl.runtime.ray.session import SessionHealth, SessionLost, ray_session
from rl.runtime.ray.supervisor import DEATHS, Supervisor


def run_ray(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
    say: Say = print,
    *,
    preempted: Callable[[], bool] = lambda: False,
) -> int:
    """Update until the last step or until `stop()`; returns the steps completed.

    Where `preempted()`, whoever asked for the end will not wait: it comes within `timeouts.grace`, saved or not.

    If Ray's own processes die, and they were ours, others are started, with all roles, which go on from the last
    checkpoint: as if the driver had died and been started again.

    Raises:
        UserError: among others, when that has happened too often, or when the Ray that died was not ours.
    """
    log = EventLog(run.events_path)
    deaths, reached = 0, 0
    while True:
        if not os.environ.get("RAY_ADDRESS"):
            end_orphans(run)
            log.append("driver", "session", pid=os.getpid(), group=os.getpgid(0))
        try:
            with ray_session() as own:
                return _run_in_session(own, experiment, run, stop, on_step, say, preempted)
        except SessionLost as error:
            lost, step = error, error.step
        log.append("driver", "session_lost", error=str(lost), step=step)
        deaths, reached = (deaths + 1, reached) if step <= reached else (1, step)
        if deaths >= DEATHS:
            raise UserError(
                f"{lost}, for the {deaths}th time without an update in between, at update {step}; is memory short? "
                "(`dmesg` tells of kills.) Its output is in /tmp/ray/session_latest/logs"
            ) from lost
        if stop():
            return step  # what was saved last is resumed
        say(f"{lost} at update {step}; starting Ray and all roles again, from the last checkpoint")


def _run_in_session(
    own: bool,
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
    say: Say,
    preempted: Callable[[], bool],
) -> int:
    """Raises SessionLost if this Ray, which is our own, has died, whatever that did to the calls under way."""
    watch, supervisor = SessionHealth(), None
    try:
        if not own:
            check_reachable(experiment.cfg.parameter_server.host, _addresses())
        supervisor = Supervisor(experiment.cfg, run, say)
        return supervisor.run(stop, on_step, preempted, watch.check)
    except Exception as error:
        if (lost := watch.loss()) is None:
            raise
        if not own:
            raise UserError(
                f"{lost}; it was of the Ray cluster that was named ({os.environ.get('RAY_ADDRESS')}), which is not "
                "this command's to start. See to the cluster, then run the same command again: it goes on from the "
                "last checkpoint"
            ) from error
        lost.step = 0 if supervisor is None else supervisor.step
        raise lost from error
    finally:
        if watch.loss() is None:
            if supervisor is not None:
                supervisor.close()
        else:
            withdraw(run)
            if own:
                watch.end()


def _addresses() -> list[str]:
    """Of the nodes that are alive."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
