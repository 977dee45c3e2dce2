"""Supervised fine-tuning, or DPO, from a model's directory and a file of rows."""

from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.input import PreferenceInput, SupervisedInput
from axlearn_like.training.alignment.preferences import DPO
from axlearn_like.training.evaluators import HeldOutEvaluator
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.trainer import Trainer
from experiments.recipes.machines import Machine
from experiments.recipes.sizes import ADAPTED, CHUNKS
from experiments.start.base import BaseModel
from experiments.start.examples import Examples
from experiments.start.fitting import choose_fit, learner, mesh_of
from experiments.start.options import StartOptions
from experiments.start.plan import SMALL, Plan, Start, rounded
from mesh.errors import UserError

_TOKENS = 16_384  # tokens of a batch, about
_EPOCHS = {"sft": 3, "dpo": 1}  # passes over the examples, of Alpaca and of Zephyr
_ROW = 2048  # tokens of a row that packs shorter examples, at most


def plan_sft(options: StartOptions, machine: Machine) -> Start:
    """Derive the trainer of `start_sft`, with the plan that says from what (UserError: it does not fit)."""
    if options.reward is not None:
        raise UserError("--reward is an option of `axl rl`; `axl train` learns the answers of the rows")
    model, plan, job = BaseModel.read(options.path("model")), Plan(), "dpo" if options.pairs else "sft"
    plan.say("--model", f"{model.path.name}, {model.parameters / 1e6:,.2f} M parameters", str(model.path))
    examples = Examples.read(options, model, plan)
    plan.say("devices", machine.text, f"this machine: {machine.memory / 1e9:.1f} GB of each for programs")
    small = model.parameters < SMALL
    seq_len, rows = _batch(examples, model, machine, plan)
    found = choose_fit(job, options, model, machine, plan, (0, seq_len, rows))
    a_pass = max(1, -(-examples.tokens // (rows * seq_len)))
    steps = options.steps or max(200 if small else 20, _EPOCHS[job] * a_pass)
    passes = f"{steps / a_pass:.1f} passes over the examples"
    plan.say("num_steps", steps, f"--steps; {passes}" if options.steps else passes)
    rate = plan.rate(job, model.parameters, lora=found.method in ADAPTED)
    every = max(1, min(100, steps // 4))
    plan.say("checkpoint.save_every", every, "a quarter of the updates, at most 100; evaluations too")
    kind = PreferenceInput if options.pairs else SupervisedInput
    batches = kind.Config(source=examples.train, seq_len=seq_len, batch_size=rows, seed=options.seed)
    chunks = 1 if small else CHUNKS["sft"]
    evaluators: tuple[Any, ...] = ()
    if examples.heldout is not None:
        heldout = batches.clone(source=examples.heldout)
        evaluators = (HeldOutEvaluator.Config(input=heldout, every=every, chunks=chunks),)
    config = Trainer.Config(
        model=model.trained(found.method, **plan.activations("model", found, small=small)),
        input=batches,
        loss=DPO.Config(beta=0.1, chunks=chunks) if options.pairs else SupervisedLoss.Config(chunks=chunks),
        learner=learner(found, rate, steps, warmup=steps * 3 // 100, end=0.0),
        checkpoint=Checkpointer.Config(save_every=every, keep=2),
        mesh=mesh_of(found, small=small),
        microbatches=found.accumulation,
        num_steps=steps,
        evaluators=evaluators,
        seed=options.seed,
    )
    what = "DPO" if options.pairs else "Supervised fine-tuning"
    about = f"{what} of {model.path.name} on the rows of {Path(options.path('data')).name}"
    return Start(config, plan, examples.shown, about, model.path)


def _batch(examples: Examples, model: BaseModel, machine: Machine, plan: Plan) -> tuple[int, int]:
    """Note and return the tokens of a row and the rows of a batch."""
    context = model.context or _ROW
    row = min(rounded(max(examples.longest, min(_ROW, 8 * examples.longest))), max(context, examples.longest))
    plan.say("input.seq_len", row, f"longest example: {examples.longest} tokens; shorter ones are packed")
    rows = max(1, min(-(-_TOKENS // row), examples.tokens // (4 * row)) // machine.count) * machine.count
    why = f"{rows * row:,} of the {examples.tokens:,} tokens; a multiple of the devices"
    return row, plan.say("input.batch_size", rows, why)
