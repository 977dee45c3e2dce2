"""All roles in this process, taking turns: for notebooks, tests and debugging."""

from collections.abc import Callable

import jax

from axlearn_like.run.directory import RunDirectory
from mesh import make_mesh
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local


def run_inprocess(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
) -> int:
    """Update until the last step or until `stop()`; returns the number of completed steps.

    The worker generates every work item that can be leased, then the trainer updates once, and so on.
    """
    controller = experiment.make_controller(run)
    weights = connect_local(experiment.make_parameter_server())
    with experiment.make_verifier() as verifier:
        trainer = experiment.make_trainer(run, controller, weights)
        worker = experiment.make_worker("worker-0", run, controller, weights, verifier)
        with trainer, jax.set_mesh(make_mesh()):
            trainer.start()
            while trainer.step < experiment.cfg.num_steps and not stop():
                while worker.run_once():
                    pass
                if trainer.run_once():
                    trainer.settle()  # nothing to overlap with: all roles take turns on one thread
                    on_step(trainer.step)
            trainer.close()
        return trainer.step
