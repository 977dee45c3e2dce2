"""The programs of a member of an elastic run: the gradient of a part of a batch, and the update by their sum."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.learner import Learner
from axlearn_like.training.losses import make_supervised_loss
from axlearn_like.training.program import TrainProgram, rows_flops, traced, trainer_programs
from axlearn_like.training.step import AccumulatedStep
from mesh import make_mesh, to_named_sharding
from mesh.cost.program import Program, Programs
from mesh.rules import use_mesh


def summed_step(cfg: Any, program: TrainProgram, learner: Learner) -> AccumulatedStep:
    """Return the step of which members run the parts; `cfg` is a trainer's, `program` its program for whole batches."""
    loss_fn = make_supervised_loss(program.graphdef, cfg.loss.build())
    return AccumulatedStep(loss_fn, learner, like=program.state, compiler_options=cfg.compiler_options)


def member_programs(cfg: Any, devices: Sequence[Any]) -> Programs:
    """Describe what a member runs on its devices: train, which is one part of a batch, update, and eval."""
    cfg.require("elastic", cfg.elastic.experts is None, "experts=None, to compile an update as two programs")
    mesh = partial(make_mesh, cfg.mesh, devices, slices=cfg.slices)
    own: Programs = {"train": lambda: _part(cfg, mesh()), "update": lambda: _update(cfg, mesh())}
    return {**own, "eval": trainer_programs(cfg, devices)["eval"]}


def _part(cfg: Any, mesh: Mesh) -> Program:
    """The gradient of a part."""
    part = cfg.clone()
    part.input.set(batch_size=cfg.input.batch_size // cfg.elastic.parts)
    rows, length = part.input.batch_size, part.input.seq_len
    step, state, batch, sums = _described(cfg, part, mesh)
    trace = partial(traced, step.accumulate, mesh, cfg.axis_rules, sums, {**step.parted(state), "rows": batch})
    flops, counted = rows_flops(cfg.model, rows, length, backward=True)
    return Program("train", mesh, trace, rows, length, flops, f"{counted}: one of {cfg.elastic.parts} parts")


def _update(cfg: Any, mesh: Mesh) -> Program:
    """The learner's update by the sum over all parts."""
    step, state, _, sums = _described(cfg, cfg, mesh)
    trace = partial(traced, step.update, mesh, cfg.axis_rules, state, sums)
    return Program("update", mesh, trace, 0, 0, 0.0, "no pass over tokens")


def _described(cfg: Any, rows: Any, mesh: Mesh) -> tuple[AccumulatedStep, Any, Any, Any]:
    """Return the step, and the state, a batch of `rows` and the sums, described."""
    cfg.check_sizes(mesh.devices.ravel())
    learner = cfg.learner.build()
    program = cfg.program(mesh, learner)
    step = summed_step(cfg, program, learner)
    with use_mesh(mesh, cfg.axis_rules):
        batch = rows.batch(mesh)
        sums = jax.eval_shape(step.empty, step.trained(program.state), batch)
        return step, program.state, batch, to_named_sharding(sums, mesh)
