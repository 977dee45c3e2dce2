"""All roles as Ray actors, each in a process of its own. Ray is started by the command unless a cluster is named."""

import contextlib
import os
import sys
from collections.abc import Callable

import ray

from axlearn_like.operations.profiler import ProfileSignal
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import UserError
from mesh.devices import find_devices
from rl.experiment import RLExperiment
from rl.fleet.requests import role_requests
from rl.runtime.cluster_file import advertise, withdraw
from rl.runtime.node.drivers import AGAIN, kept_ray
from rl.runtime.node.orphans import end_orphans
from rl.runtime.ray.adoption import Starter, adopt
from rl.runtime.ray.devices.capacity import wait_for_nodes
from rl.runtime.ray.devices.reservation import DeviceWait, Reservation, Stopped, refuse_accelerators
from rl.runtime.ray.fault_injection import FaultInjection
from rl.runtime.ray.preflight import check_reachable
from rl.runtime.ray.remote_actors import RayActors, end_roles
from rl.runtime.ray.run_logs import RunLogs
from rl.runtime.ray.session import SessionHealth, SessionLost, ray_session, session_folder
from rl.runtime.simulated.failures import Faults
from rl.runtime.supervision.actors import Say
from rl.runtime.supervision.health import MAX_DEATHS
from rl.runtime.supervision.names import process_groups, spare_names
from rl.runtime.supervision.role_group import Roles
from rl.runtime.supervision.supervisor import Supervisor
from rl.training.warm_start import is_warm_start_due, latest_step, open_warm_start


def run_ray(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
    say: Say = print,
    *,
    preempted: Callable[[], bool] = lambda: False,
    faults: Faults | None = None,
) -> int:
    """Update until the last step or until `stop()`; returns the completed updates.

    If Ray's own processes die and this command started them, Ray and all roles are restarted from the last checkpoint.

    Args:
        stop: True ends the run after the current update.
        on_step: called with the number of completed updates.
        preempted: True if the machine is about to be taken away: the run ends within `timeouts.grace`, saved or not.
        faults: what to kill, to see that the run recovers; None: nothing.

    Raises:
        UserError: among others, Ray died too often, or the Ray that died was not started by this command.
    """
    log, faults = EventLog(run.events_path), faults or Faults()
    deaths, reached = 0, 0
    while True:
        kept = kept_ray()
        if not os.environ.get("RAY_ADDRESS"):
            if kept is None:
                end_orphans(run)
            log.append("driver", "session", pid=os.getpid(), group=os.getpgid(0) if kept is None else kept.group)
        try:
            warm = open_warm_start(experiment.cfg.warm_start, run)
            with warm, ray_session() as own, contextlib.closing(ProfileSignal(run.path)):
                return _run_in_session(own, experiment, run, stop, on_step, say, preempted, faults)
        except SessionLost as error:
            lost, step = error, error.step
        log.append("driver", "session_lost", error=str(lost), step=step)
        deaths, reached = (deaths + 1, reached) if step <= reached else (1, step)
        if deaths >= MAX_DEATHS:
            raise UserError(
                f"{lost}, for the {deaths}th time without an update in between, at update {step}; is memory short? "
                f"(`dmesg` lists kills.) Its output is in {session_folder()}/session_latest/logs"
            ) from lost
        if stop():
            return step  # a resumed run starts from the last checkpoint
        say(f"{lost} at update {step}; restarting Ray and all roles from the last checkpoint")


def _run_in_session(
    own: bool,
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
    say: Say,
    preempted: Callable[[], bool],
    faults: Faults,
) -> int:
    """Run the roles in this Ray session; SessionLost means that Ray, started by this command, has died."""
    cfg, health, supervisor, reservation, roles = experiment.cfg, SessionHealth(), None, None, None
    injection = FaultInjection(run, workers=cfg.workers, faults=faults)
    try:
        if not own:
            wait_for_nodes(stop, health.check, say)
            if stop():
                raise Stopped
            check_reachable(cfg.parameter_server.host, _addresses())
        reservation = _reserve(own, cfg, run, stop, say, health)
        starter = Starter(cfg, run, reservation)
        roles = Roles(cfg, calls := RayActors(starter, starter.driver))
        found, logs = adopt(roles, starter), RunLogs(cfg, run)
        supervisor = Supervisor(cfg, roles, calls, logs, EventLog(run.events_path), say, injection)
        supervisor.adopt(found, [name for name in starter.found if name in roles.loops and name not in found])
        advertise(run, ray.get_runtime_context().gcs_address, starter.namespace)
        due = is_warm_start_due(cfg.warm_start, run)
        return supervisor.run(stop, on_step, preempted, health.check, warm_start=due)
    except Stopped:
        return latest_step(run.checkpoints / "rl") or 0
    except Exception as error:
        if (lost := health.loss()) is None:
            raise
        if lost.others and not stop():  # the roles there work on, and the next driver joins them
            sys.stdout.flush()
            os._exit(AGAIN)
        if not own:
            raise UserError(
                f"{lost}; it belongs to a Ray cluster that this command did not start "
                f"(RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}). Repair the cluster, then run the same command again: "
                "it resumes from the last checkpoint"
            ) from error
        lost.step = 0 if supervisor is None else supervisor.step
        raise lost from error
    finally:
        if health.loss() is None:
            if supervisor is not None and roles is not None:
                withdraw(run)
                end_roles(roles, cfg.timeouts)
                supervisor.read_logs()
                injection.close(say)
            if reservation is not None:
                reservation.release()
        else:
            withdraw(run)
            if own:
                health.end()


def _reserve(
    own: bool, cfg: RLExperiment.Config, run: RunDirectory, stop: Callable[[], bool], say: Say, health: SessionHealth
) -> Reservation:
    """Reserve the devices of the roles, if the fleet describes them or this machine has a GPU to share."""
    requests = role_requests(cfg, find_devices() if own else ())
    if not own:
        refuse_accelerators(requests)
    wait = DeviceWait(cfg.timeouts, say, EventLog(run.events_path), stop, health.check)
    names = {
        role: [*groups, *([one] for one in spare_names(cfg).get(role, ()))]
        for role, groups in process_groups(cfg).items()
    }
    return Reservation.make(requests, names, wait)


def _addresses() -> list[str]:
    """Return the addresses of the live nodes."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
