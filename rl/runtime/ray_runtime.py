"""Every role in a process of its own, as Ray actors; Ray is started inside the command unless a cluster is named."""

import os
from collections.abc import Callable

from axlearn_like.run_directory import EventLog, RunDirectory
from rl.experiment import RLExperiment
from rl.runtime.fleet import Fleet
from rl.runtime.leftovers import end_leftovers
from rl.runtime.planned_kill import Say
from rl.runtime.ray_session import ray_session


def run_ray(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
    say: Say = print,
    *,
    hurried: Callable[[], bool] = lambda: False,
) -> int:
    """Update until the last step or until `stop()`; returns the steps completed.

    Where `hurried()`, whoever asked for the end will not wait: it comes within `patience.grace`, saved or not.
    """
    if not os.environ.get("RAY_ADDRESS"):
        end_leftovers(run)
        EventLog(run.events_path).append("driver", "session", pid=os.getpid(), group=os.getpgid(0))
    with ray_session():
        fleet = Fleet(experiment.cfg, run, say)
        try:
            return fleet.run(stop, on_step, hurried)
        finally:
            fleet.close()
