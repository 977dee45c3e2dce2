"""Experiments that begin with a model's directory and a file of rows: sizes, rates and evaluation are derived.

    from experiments.start import start_rl
    from tools.run import run

    done = run(start_rl("models/Qwen3-0.6B", "rows.jsonl", reward="mine.py:score"))

What is returned is a config as any other: `--set`, modifiers, resuming, reports, export. `served` and `exported` begin
with a model's directory too, and end with one.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.start.options import StartOptions

if TYPE_CHECKING:
    from axlearn_like.training.trainer import Trainer
    from experiments.recipes.machines import Machine
    from experiments.start.plan import Start
    from rl.experiment import RLExperiment

__all__ = ["StartOptions", "plan_start", "start_rl", "start_sft"]


def start_rl(model: str | Path, data: str | Path, **options: object) -> "RLExperiment.Config":
    """Return an experiment that improves a model by GRPO on the rows of a file, on this machine.

    Args:
        model: directory in Hugging Face's form.
        data: file of rows.
        options: others of `StartOptions`, such as `reward="mine.py:score"`.

    Raises:
        UserError: model, rows or reward do not fit, or the devices are too small.
    """
    found: RLExperiment.Config = plan_start("rl", StartOptions(model=model, data=data, **options)).config  # pyright: ignore
    return found


def start_sft(model: str | Path, data: str | Path, **options: object) -> "Trainer.Config":
    """Return a trainer that fine-tunes a model on the rows of a file, with `pairs=True` by DPO; see `start_rl`."""
    found: Trainer.Config = plan_start("train", StartOptions(model=model, data=data, **options)).config  # pyright: ignore
    return found


def plan_start(command: str, options: StartOptions, machine: "Machine | None" = None) -> "Start":
    """Return what `axl rl` or `axl train` derives of these options for a machine; None: this one.

    Raises:
        UserError: they do not fit.
    """
    from experiments.recipes.machines import find_machine
    from experiments.start.rl import plan_rl
    from experiments.start.sft import plan_sft

    return (plan_rl if command == "rl" else plan_sft)(options, machine or find_machine("here"))
