"""Programs that a role of an RL run calls, traced, to be compiled before it starts."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.training.programs import traced
from mesh import make_mesh
from mesh.rules import axis_sizes, use_mesh
from rl.fleet.programs import described_states, experiment_programs, microbatches, rollout_rows
from rl.protocol.experiment import Experiment
from rl.rollout.model_runner.aot import programs_of_run
from rl.training.program import Described, sharded_rows
from rl.training.scoring.logprob_diff import make_logprobs
from rl.training.scoring.reference_programs import describe_reference, parts_of_rows, reference_programs
from rl.training.scoring.update_logprobs import scored_arrays

Traces = list[Callable[[], Any]]


def role_programs(
    role: str, experiment: Experiment, devices: Sequence[Any], trainer_devices: Sequence[Any]
) -> tuple[Mesh, Traces]:
    """Return the mesh of a role, and functions that trace its programs under it.

    Args:
        role: trainer, worker or reference.
        experiment: the experiment on its fleet.
        devices: devices of the role, which need not exist.
        trainer_devices: devices of the trainer, described: a reference scores the rows of its microbatches.
    """
    if role == "worker":
        mesh, dispatches = programs_of_run(experiment.engine_cfg, devices)
        return mesh, [one.trace for one in dispatches]
    cfg = experiment.trainer_cfg
    if role == "reference":
        rows = microbatches(experiment, make_mesh(cfg.mesh, trainer_devices, slices=cfg.slices))
        mesh = cfg.check_reference(devices)
        return mesh, _reference(experiment, mesh, rows)
    programs = experiment_programs(experiment, devices)
    wanted = ("train", "update", "score", *cfg.critic_programs)
    chosen = [programs[name]() for name in programs if name.partition("_")[0] in wanted]
    mesh = chosen[0].mesh
    found = [*(one.trace for one in chosen), *_logprobs(experiment, mesh)]
    if cfg.build_objective().needs_exact_kl:
        found += _reference_states(experiment, mesh)
    if cfg.reference is not None and cfg.reference.another_model and cfg.reference_devices is None:
        found += _reference(experiment, mesh, microbatches(experiment, mesh))
    return mesh, found


def _logprobs(experiment: Experiment, mesh: Mesh) -> Traces:
    """Scoring of the trainer's own rows, by the forward pass of the update."""
    cfg = experiment.trainer_cfg
    program = cfg.program(mesh)
    score = make_logprobs(program.graphdef, cfg.spec())
    params = program.state["params"]
    rows = [scored_arrays(batch) for batch in microbatches(experiment, mesh)]
    return [partial(traced, score, mesh, cfg.axis_rules, params, one) for one in rows]


def _reference_states(experiment: Experiment, mesh: Mesh) -> Traces:
    """The reference's forward pass without its head, for the divergence from it of whole distributions."""
    (states, params), rules = described_states(experiment, mesh), experiment.trainer_cfg.axis_rules
    rows = [states.read(batch) for batch in microbatches(experiment, mesh)]
    return [partial(traced, states.states, mesh, rules, params, one) for one in rows]


def _reference(experiment: Experiment, mesh: Mesh, batches: list[Described]) -> Traces:
    """Scoring of the trainer's rows, and of whole rollouts, by the reference."""
    cfg, found = experiment.trainer_cfg, list[Callable[[], Any]]()
    assert cfg.reference is not None, "a fleet's reference role is refused without one"
    known, wanted = describe_reference(cfg, mesh), reference_programs(cfg.build_objective())
    trace = partial(partial, traced)
    with use_mesh(mesh, cfg.axis_rules):
        each = math.prod(axis_sizes("batch").values())
        for batch in batches if "reference" in wanted else []:
            sent = scored_arrays(batch, routed=not cfg.reference.another_model)
            most = None if cfg.packing is None else cfg.packing.rows
            count = batch["targets"].shape[0]
            for rows in sorted({total for _, total in parts_of_rows(count, most, each)}):
                resized = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in sent.items()}
                found.append(trace(known.rows, mesh, cfg.axis_rules, known.params, sharded_rows(resized, mesh)))
    if "reference_rollouts" in wanted:
        found.append(trace(known.rollouts, mesh, cfg.axis_rules, known.params, **rollout_rows(experiment, mesh)))
    return found
