"""All roles in this process, taking turns: for notebooks, tests, debugging, and for a single TPU chip or GPU.

Trainer and engine share the devices. While the trainer updates, the engine sleeps: weights and pages take no memory.
With `fleet.reference` the reference policy has the last devices of this process to itself.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, Self

import jax

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from mesh import make_mesh
from rl.experiment import RLExperiment
from rl.fleet.devices import HERE
from rl.fleet.fleet import reference_devices
from rl.parameter_server.client import connect_local
from rl.runtime.policies.roles import PolicyRoles
from rl.runtime.policies.runs import ByPolicy
from rl.training.spec import TrainerServices
from rl.training.warm_start import open_warm_start, run_warm_start


class DeviceSplit(NamedTuple):
    """Devices of this process, by role; None: all."""

    trainer: list[Any] | None
    reference: list[Any] | None

    @classmethod
    def of(cls, cfg: RLExperiment.Config) -> Self:
        """Return the devices of trainer and reference (UserError: there are too few, or others)."""
        if cfg.fleet.reference is None:
            return cls(None, None)
        apart = reference_devices(cfg.fleet.reference)
        found, count = jax.devices(), len(apart.described)
        fits = cfg.fleet.reference != HERE and found[0].platform == apart.platform and len(found) > count
        there = f"{len(found)} x {found[0].device_kind}"
        expected = f"some of the {there} of this process, such as {apart.platform}:1, and one or more for the trainer"
        cfg.fleet.require("reference", fits, f"{expected} (JAX_NUM_CPU_DEVICES is the number of a CPU's)")
        return cls(list(found[:-count]), list(found[-count:]))


def remade_config(cfg: RLExperiment.Config) -> RLExperiment.Config:
    """Return the config by which this process makes a run again, of which nothing but the updates is wanted.

    What acts on the world beside them is left out: evaluations, audits, copies, other processes, writers, checkpoints.
    """
    cfg = cfg.clone(evaluation=None, evaluate_every=None)
    cfg.controller.set(audit=0.0)
    cfg.trainer.set(processes=1, writers=(), keep_best=None, early_stopping=None, watchdog=None)
    cfg.trainer.checkpoint.set(save_every=1 << 40, keep=1 << 20)
    return cfg


def run_inprocess(
    experiment: RLExperiment,
    run: RunDirectory,
    stop: Callable[[], bool],
    on_step: Callable[[int], None],
) -> int:
    """Update until the last step or until `stop()`; returns the number of completed steps.

    After the warm start and the evaluation before training, the worker generates every work item that can be leased,
    then the trainer updates once, and so on. The evaluation of the last version comes after the last checkpoint.
    """

    def stopped() -> bool:
        on_step(0)
        return stop()

    with open_warm_start(experiment.cfg.warm_start, run):
        if not run_warm_start(experiment.cfg.warm_start, run, stopped):
            return 0
    log = EventLog(run.events_path)
    log.append("driver", "session", pid=os.getpid(), group=os.getpgid(0))
    with local_roles(experiment, run) as (trainer, worker):
        for role in ("controller", "trainer", worker.name):
            log.append(role, "start", pid=os.getpid(), host=socket.gethostname())
        with trainer, closing(worker), jax.set_mesh(make_mesh()):
            trainer.start()
            while not trainer.done() and not stop():
                while not stop() and worker.run_once():
                    on_step(trainer.step)
                worker.sleep()  # roles share the devices, whose memory need not hold both at once
                if trainer.run_once():
                    trainer.settle()  # nothing to overlap with: all roles take turns on one thread
                on_step(trainer.step)
            trainer.close()
            while not stop() and worker.run_once():
                on_step(trainer.step)
            trainer.offer_evaluated()
        return trainer.step


@contextmanager
def local_roles(
    experiment: RLExperiment, run: RunDirectory, around: Callable[[Any], Any] = lambda controller: controller
) -> Iterator[tuple[Any, Any]]:
    """Build all roles in this process; yields trainer and worker. `around`: wraps the controller for the trainer."""
    if experiment.cfg.policies:
        roles = PolicyRoles(experiment, run)
        controllers, servers = roles.make_controller(), roles.make_parameter_server()
        weights = ByPolicy(roles.names, lambda name: connect_local(servers.of(name)))
        with roles.make_verifier() as verifiers:
            trainer = roles.make_trainer(controllers, controllers.of, weights)
            yield trainer, roles.make_worker("worker-0", controllers, weights, ByPolicy(roles.names, verifiers.of))
        return
    controller = experiment.make_controller(run)
    weights = connect_local(experiment.make_parameter_server())
    with experiment.make_verifier() as verifier:
        devices, reference = DeviceSplit.of(experiment.cfg), None
        if devices.reference is not None:
            reference = experiment.make_reference_scorer(run, devices.reference)
        services = TrainerServices(around(controller), weights, reference)
        trainer = experiment.make_trainer(run, services, devices=devices.trainer)
        yield trainer, experiment.make_worker("worker-0", run, controller, weights, verifier)
