"""The steps of an experiment, ready to be traced."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from axlearn_like.config import ConfigBase
from axlearn_like.operations.flops import causal_pairs, decoder_flops, window_of
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.losses import eval_step
from axlearn_like.training.program import check_length, check_rows, describe_batch
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh
from mesh.errors import did_you_mean
from rl.experiment import RLExperiment
from rl.rollout.aot import engine_tracings
from rl.training.program import make_score_rows


class Step(NamedTuple):
    """A step of an experiment on a mesh.

    Attributes:
        name: train, eval, score, or a dispatch of the engine.
        mesh: that it runs on.
        trace: gives `jitted.trace(...)`; called with the mesh in force.
        flops: of the model, on all devices.
        counted: what those FLOPs are of, in words.
    """

    name: str
    mesh: Mesh
    trace: Callable[[], Any]
    flops: float
    counted: str


SUPERVISED = ("train", "eval")
REINFORCEMENT = ("train", "score", "prefill", "decode")


def step_names(cfg: ConfigBase) -> tuple[str, ...]:
    """The steps that an experiment has.

    Raises:
        UserError: it is neither supervised nor reinforcement learning.
    """
    if isinstance(cfg, Trainer.Config):
        return SUPERVISED
    if isinstance(cfg, RLExperiment.Config):
        return REINFORCEMENT
    raise UserError(f"{type(cfg).__qualname__} has no steps to compile; expected Trainer.Config or RLExperiment.Config")


def find_step(cfg: ConfigBase, step: str, devices: list[Any]) -> Step:
    """A step on these devices, checked as far as it can be without a compiler.

    Raises:
        UserError: there is no such step, or sizes do not fit each other.
    """
    names = step_names(cfg)
    if step not in names:
        raise UserError(f"--step {step}: this experiment has no such step{did_you_mean(step, names)}")
    if isinstance(cfg, RLExperiment.Config):
        experiment = cfg.build()
        if step in ("prefill", "decode"):
            return _engine(experiment, step, devices)
        return _policy(experiment, step, make_mesh(cfg.trainer.mesh, devices, slices=cfg.trainer.slices))
    assert isinstance(cfg, Trainer.Config)
    mesh = make_mesh(cfg.mesh, devices, slices=cfg.slices)
    return _train(cfg, mesh) if step == "train" else _eval(cfg, mesh)


def _train(cfg: Trainer.Config, mesh: Mesh) -> Step:
    program = cfg.program(mesh)
    rows, length = cfg.input.batch_size, cfg.input.seq_len
    with jax.set_mesh(mesh):
        batch = describe_batch(cfg.input, mesh)
    flops = decoder_flops(
        cfg.model,
        tokens=rows * length,
        head_tokens=rows * length,
        pairs=causal_pairs(rows, length, window_of(cfg.model)),
        backward=True,
    )
    counted = f"forward and backward pass of {rows} rows of {length} tokens, unpacked, causal half"
    train: Any = program.step
    return Step("train", mesh, lambda: train.trace(program.state, batch), flops, counted)


def _eval(cfg: Trainer.Config, mesh: Mesh) -> Step:
    inputs = next((e.input for e in cfg.evaluators if isinstance(e, LossEvaluator.Config)), cfg.input)
    check_rows(inputs, mesh, 1)
    check_length(cfg.model, inputs.seq_len, "the evaluator's input.seq_len")
    program = cfg.program(mesh)
    with jax.set_mesh(mesh):
        batch = describe_batch(inputs, mesh)
        step: Any = eval_step(program.graphdef, cfg.loss.build())
    rows, length = inputs.batch_size, inputs.seq_len
    flops = decoder_flops(
        cfg.model,
        tokens=rows * length,
        head_tokens=rows * length,
        pairs=causal_pairs(rows, length, window_of(cfg.model)),
    )
    counted = f"forward pass of {rows} rows of {length} tokens, unpacked, causal half"
    return Step("eval", mesh, lambda: step.trace(program.state["params"], batch), flops, counted)


def _policy(experiment: RLExperiment, step: str, mesh: Mesh) -> Step:
    cfg = experiment.cfg
    trainer = experiment.trainer_cfg
    program = trainer.program(mesh)
    if step == "score":
        described = trainer.rows(mesh, groups=cfg.groups, samples=cfg.samples)
        rows, length = described["tokens"].shape
        flops = decoder_flops(
            cfg.policy, tokens=rows * length, head_tokens=rows * length, pairs=causal_pairs(rows, length)
        )
        counted = f"forward pass of {rows} rows of {length} tokens"
        score: Any = make_score_rows(program.graphdef, trainer.chunks)
        return Step(step, mesh, lambda: score.trace(program.state["params"], **described), flops, counted)
    batch = trainer.batch(mesh, groups=cfg.groups, samples=cfg.samples)
    groups, samples, new = cfg.groups, cfg.samples, cfg.max_new  # a prompt counts once, in however many rows it is
    trunk = batch["trunk"].shape[1]
    branches = groups * samples * new
    pairs = causal_pairs(groups, trunk) + causal_pairs(groups * samples, new) + branches * trunk
    flops = decoder_flops(
        cfg.policy, tokens=groups * trunk + branches, head_tokens=branches, pairs=pairs, backward=True
    )
    counted = f"forward and backward pass of {groups} prompts of {trunk + 1} tokens, {samples} answers of {new} each"
    train: Any = program.step
    return Step(step, mesh, lambda: train.trace(program.state, batch), flops, counted)


def _engine(experiment: RLExperiment, step: str, devices: list[Any]) -> Step:
    cfg = experiment.engine_cfg
    mesh, found = engine_tracings(cfg, devices)
    name = {"prefill": [n for n in found if n.startswith("prefill")][-1:], "decode": [n for n in found if "plain" in n]}
    chosen = name[step][0]
    longest = cfg.max_prompt + cfg.max_new
    if step == "decode":
        tokens = cfg.max_num_seqs * cfg.steps_per_dispatch
        flops = decoder_flops(cfg.model, tokens=tokens, head_tokens=tokens, pairs=tokens * longest)
        counted = f"{cfg.steps_per_dispatch} tokens of {cfg.max_num_seqs} sequences, each at its greatest length"
    else:
        rows, chunk = (int(n) for n in chosen.removeprefix("prefill ").split(" x "))
        flops = decoder_flops(cfg.model, tokens=rows * chunk, head_tokens=0, pairs=causal_pairs(rows, chunk))
        counted = f"{rows} x {chunk} tokens at the beginning of a prompt"
    return Step(chosen, mesh, found[chosen], flops, counted)


def described(mesh: Mapping[str, int]) -> str:
    """Formats a mesh shape, for example "fsdp 4 x tensor 2"."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items() if size != 1) or "one device"
