"""Programs of an RL experiment, to be compiled, and the fields that tune its train step."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.layers.base import Params, Workload, refuse_inexact
from axlearn_like.operations.flops import causal_pairs, model_flops, shared_prompt_workload
from axlearn_like.training.program import Tuning, rows_flops, traced
from mesh import make_mesh, to_named_sharding
from mesh.cost.program import Program, Programs
from mesh.rules import axis_sizes, use_mesh
from rl.protocol.experiment import Experiment, ExperimentConfig
from rl.rollout.model_runner.dispatches import engine_dispatches
from rl.training.program import Described, make_score_rows
from rl.training.scoring.reference_programs import describe_reference, reference_programs
from rl.training.scoring.reference_states import describe_policy
from rl.training.scoring.update_logprobs import scored_arrays


def experiment_programs(experiment: Experiment, devices: Sequence[Any]) -> Programs:
    """Return the programs of an experiment on these devices.

    These are train and score of the trainer, update and values of its critic, if it has one, prefill and decode of
    an engine that has all devices to itself, and scoring by a reference policy that has them, if there is one, or its
    hidden states, by the trainer.
    """
    cfg = experiment.cfg.trainer
    mesh = partial(make_mesh, cfg.mesh, devices, slices=cfg.slices)
    train: Programs = {"train": lambda: _train(experiment, mesh())}
    if (packing := experiment.trainer_cfg.build_packing()) is not None:
        # `train` is the gradient of a microbatch of the longest rows, which needs the most memory.
        train = {
            f"train_{length}" if index else "train": partial(_microbatch, experiment, mesh, length)
            for index, length in enumerate(packing.lengths)
        }
        train = {**train, "update": lambda: _update(experiment, mesh())}
    critic = {name: partial(_critic, experiment, mesh, name) for name in experiment.trainer_cfg.critic_programs}
    objective = experiment.trainer_cfg.build_objective()
    reference = reference_programs(objective) if cfg.reference is not None else ()
    exact = objective.needs_exact_kl and cfg.reference is not None
    return {
        **train,
        **critic,
        **{name: partial(_reference, experiment, name, devices) for name in reference},
        **({"reference_states": lambda: _reference_states(experiment, mesh())} if exact else {}),
        "score": lambda: _score(experiment, mesh()),
        "prefill": lambda: _engine(experiment, "prefill", devices),
        "decode": lambda: _engine(experiment, "decode", devices),
    }


def experiment_tuning(cfg: ExperimentConfig) -> Tuning:
    """Return the fields that tune the update of the policy."""
    each_row = cfg.trainer.samples_per_row or cfg.samples_per_prompt
    return Tuning(
        model=cfg.policy,
        model_field="policy",
        prefix="trainer.",
        mesh=cfg.trainer.mesh,
        rules=cfg.trainer.axis_rules,
        microbatches=cfg.trainer.microbatches,
        rows=cfg.prompts_per_step * cfg.samples_per_prompt // each_row,
        length=cfg.max_prompt_tokens + each_row * cfg.max_new_tokens,
        row_multiple=cfg.trainer.row_multiple,
    )


def microbatches(experiment: Experiment, mesh: Mesh, row_multiple: int | None = None) -> list[Described]:
    """Return the described arrays of the trainer's microbatches: one for each length of packed rows, longest first.

    `row_multiple`: of padded rows, on another mesh than the trainer's; None: the trainer's own.
    """
    cfg, trainer = experiment.cfg, experiment.trainer_cfg
    trainer = trainer if row_multiple is None else trainer.clone(row_multiple=row_multiple)
    return [*trainer.batches(mesh, groups=cfg.prompts_per_step, samples=cfg.samples_per_prompt).values()]


def _train(experiment: Experiment, mesh: Mesh) -> Program:
    cfg, trainer = experiment.cfg, experiment.trainer_cfg
    groups, samples, new = cfg.prompts_per_step, cfg.samples_per_prompt, cfg.max_new_tokens
    program, (batch,) = trainer.program(mesh), microbatches(experiment, mesh)
    rows, prefix = batch["prefix"].shape
    # A prompt counts once, in however many rows it is.
    flops = model_flops(cfg.policy, shared_prompt_workload(groups, prefix, samples, new), backward=True)
    counted = f"forward and backward pass of {groups} prompts of {prefix + 1} tokens, {samples} answers of {new} each"
    trace = partial(traced, program.step, mesh, trainer.axis_rules, program.state, batch)
    return Program("train", mesh, trace, rows, prefix + batch["inputs"].shape[1] * new, flops, counted)


def _microbatch(experiment: Experiment, make: Callable[[], Mesh], length: int) -> Program:
    """The gradient of a microbatch of packed rows, added to those before it."""
    cfg, trainer, mesh = experiment.cfg, experiment.trainer_cfg, make()
    sizes = {"groups": cfg.prompts_per_step, "samples": cfg.samples_per_prompt}
    program, batch = trainer.program(mesh), trainer.batches(mesh, **sizes)[length]
    rows, prefix = batch["prefix"].shape
    sums = _sums(program, mesh, trainer, batch)
    flops = model_flops(cfg.policy, shared_prompt_workload(rows, prefix, 1, length), backward=True)
    what = f"{rows} rows of {prefix} tokens of prompts and {length} of answers, unpacked"
    inputs = {**program.step.parted(program.state), "rows": batch}
    trace = partial(traced, program.step.accumulate, mesh, trainer.axis_rules, sums, inputs)
    return Program("train", mesh, trace, rows, prefix + length, flops, f"forward and backward pass of {what}")


def _update(experiment: Experiment, mesh: Mesh) -> Program:
    """The learner's update, after the last microbatch."""
    trainer = experiment.trainer_cfg
    program = trainer.program(mesh)
    sums = _sums(program, mesh, trainer, microbatches(experiment, mesh)[0])
    trace = partial(traced, program.step.update, mesh, trainer.axis_rules, program.state, sums)
    return Program("update", mesh, trace, 0, 0, 0.0, "no pass over tokens")


def _sums(program: Any, mesh: Mesh, trainer: Any, batch: Any) -> Any:
    """Describe the summed gradients and metrics."""
    with use_mesh(mesh, trainer.axis_rules):
        params = program.step.trained(program.state)
        return to_named_sharding(jax.eval_shape(program.step.empty, params, batch), mesh)


def _score(experiment: Experiment, mesh: Mesh) -> Program:
    cfg, trainer = experiment.cfg, experiment.trainer_cfg
    program = trainer.program(mesh)
    refuse_inexact(cfg.policy, mesh.devices.flat[0].platform)
    score = make_score_rows(program.graphdef, trainer.chunks, numerics_of(cfg.policy), trainer.head_tile)
    return _of_rollouts("score", experiment, mesh, score, program.state["params"])


def _reference(experiment: Experiment, name: str, devices: Sequence[Any]) -> Program:
    """Scoring by the reference: of an update's rows, of the longest if they are packed; or of all whole rollouts."""
    trainer = experiment.trainer_cfg
    mesh = trainer.check_reference(devices)
    known = describe_reference(trainer, mesh)
    if name == "reference_rollouts":
        return _of_rollouts(name, experiment, mesh, known.rollouts, known.params)
    with use_mesh(mesh, trainer.axis_rules):
        multiple = math.lcm(trainer.row_multiple, math.prod(axis_sizes("batch").values()))
    batch = microbatches(experiment, mesh, row_multiple=multiple)[0]
    batch = scored_arrays(batch, routed=not trainer.reference.another_model)
    return _of_rows(name, experiment, mesh, known.rows, known.params, batch)


def _reference_states(experiment: Experiment, mesh: Mesh) -> Program:
    """The reference's forward pass without its head, by the trainer; of the longest rows if they are packed."""
    trainer = experiment.trainer_cfg
    with use_mesh(mesh, trainer.axis_rules):
        known = describe_policy(trainer.model, trainer.reference, mesh)
        states = known.states(trainer.chunks)
    batch = states.read(microbatches(experiment, mesh)[0])
    return _of_rows("reference_states", experiment, mesh, states.states, known.params, batch)


def _of_rollouts(name: str, experiment: Experiment, mesh: Mesh, score: Any, params: Params) -> Program:
    """A forward pass over all whole rollouts of an update."""
    sizes = {"groups": experiment.cfg.prompts_per_step, "samples": experiment.cfg.samples_per_prompt}
    arrays = experiment.trainer_cfg.rows(mesh, **sizes)
    rows, length = arrays["tokens"].shape
    trace = partial(traced, score, mesh, experiment.trainer_cfg.axis_rules, params, **arrays)
    return Program(name, mesh, trace, rows, length, *rows_flops(experiment.cfg.policy, rows, length))


def _of_rows(name: str, experiment: Experiment, mesh: Mesh, score: Any, params: Params, batch: Described) -> Program:
    """A forward pass over the rows of a microbatch."""
    (rows, prefix), own = batch["prefix"].shape, math.prod(batch["inputs"].shape[1:])
    trace = partial(traced, score, mesh, experiment.trainer_cfg.axis_rules, params, batch)
    return Program(name, mesh, trace, rows, prefix + own, *rows_flops(experiment.cfg.policy, rows, prefix + own))


def _critic(experiment: Experiment, make: Callable[[], Mesh], name: str) -> Program:
    """An update of the critic by a batch, or the values of its rollouts before that."""
    cfg, trainer, mesh = experiment.cfg, experiment.trainer_cfg, make()
    with use_mesh(mesh, trainer.axis_rules):
        program, rollouts = trainer.program(mesh), cfg.prompts_per_step * cfg.samples_per_prompt
        critic, update = trainer.build_critic(program.graphdef), name == "critic"
        if update:
            step, (state,), arrays = critic.step, critic.describe().values(), critic.describe_update(rollouts)
        else:
            step, state, arrays = critic.score, critic.describe_reads(program.state), critic.describe_rows(rollouts)
    rows, length = arrays["tokens"].shape
    workload = Workload(rows * length, 0, partial(causal_pairs, rows, length))
    flops = model_flops(cfg.policy, workload, backward=update)
    passes = "forward and backward" if update else "forward"
    counted = f"{passes} pass of {rows} rows of {length} tokens, without a head"
    trace = partial(traced, step, mesh, trainer.axis_rules, state, arrays)
    return Program(name, mesh, trace, rows, length, flops, counted)


def _engine(experiment: Experiment, step: str, devices: Sequence[Any]) -> Program:
    """The largest prefill, or plain decoding, of the experiment's engine."""
    cfg = experiment.engine_cfg
    mesh, dispatches = engine_dispatches(cfg, devices)
    chosen = [one for one in dispatches if one.kind == step and one.plain][-1]
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    if step == "decode":
        tokens = cfg.max_num_seqs * cfg.steps_per_dispatch
        work = Workload(tokens, tokens, lambda window: tokens * min(longest, window or longest))
        counted = f"{cfg.steps_per_dispatch} tokens of {cfg.max_num_seqs} sequences, each at its greatest length"
    else:
        work = Workload(chosen.rows * chosen.length, 0, partial(causal_pairs, chosen.rows, chosen.length))
        counted = f"{chosen.rows} x {chosen.length} tokens at the beginning of a prompt"
    trace = partial(_trace_on, mesh, chosen.trace)
    return Program(step, mesh, trace, chosen.rows, chosen.length, model_flops(cfg.model, work), counted)


def _trace_on(mesh: Mesh, trace: Any) -> Any:
    with jax.set_mesh(mesh):
        return trace()
