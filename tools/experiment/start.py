"""`axl rl|train --model DIR --data FILE`, or a YAML file of these options, in the place of EXPERIMENT."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.start.options import StartOptions, read_recipe
from mesh.errors import UserError

if TYPE_CHECKING:
    from experiments.start.plan import Start

_RECIPES = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options that `axl train` and `axl rl` share: the experiment, its edits and seed, where it runs."""

    experiment: str | None
    sets: tuple[str, ...]
    applied: tuple[str, ...]
    seed: int | None
    run_dir: Path | None
    force: bool
    quiet: bool


def start_options(command: str) -> Callable[..., Any]:
    """Add the options of a start to `axl rl` or `axl train`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for field in reversed(_fields(command)):
            flag, kind = "--" + field.name.replace("_", "-"), field.metadata["kind"]
            flag += "/--no-lora" if field.name == "lora" else ""
            own: dict[str, Any] = {"is_flag": True, "default": None} if kind is bool else {"type": kind}
            function = click.option(flag, field.name, help=field.metadata["help"], **own)(function)
        return function

    return decorate


def is_start(run: RunOptions, start: StartOptions) -> bool:
    """Return True if --model, or a YAML file, stands for EXPERIMENT; UserError if nothing does, or both."""
    if start.model is not None or (run.experiment or "").endswith(_RECIPES):
        return True
    if start.given or run.experiment is None:
        needs = f"{start.given[0]} needs --model DIR" if start.given else "expected EXPERIMENT, or --model DIR"
        raise UserError(f"{needs} and --data FILE")
    return False


def begin(command: str, run: RunOptions, start: StartOptions) -> tuple[RunOptions, StartOptions, Start | None]:
    """Return the options with those of a YAML file, and what was derived; None where EXPERIMENT is given.

    Raises:
        UserError: the model, rows or devices do not fit `axl COMMAND`.
    """
    from tools.experiment import default_run_dir, trust_place

    if not is_start(run, start):
        trust_place(start.reward or "")
        start.check_export(default_run_dir(run.experiment or "", run.run_dir))
        return run, start, None
    if run.experiment is not None and run.experiment.endswith(_RECIPES):
        run, start = _with_recipe(command, run, start)
    if run.experiment is not None:
        raise UserError(f"--model {start.model} and the experiment {run.experiment!r}: expected one of them")
    if start.model is None or start.data is None:
        raise UserError("expected --model DIR and --data FILE: a model, and the rows that it learns from")
    from experiments.start import plan_start

    trust_place(start.reward or "")
    name = run_name(command, start) if start.save_experiment is None else Path(start.save_experiment).stem
    where = run.run_dir or Path("runs") / name
    start.check_export(where)
    found = plan_start(command, dataclasses.replace(start, seed=run.seed or 0))
    return dataclasses.replace(run, seed=None, run_dir=where), start, found


def run_name(command: str, start: StartOptions) -> str:
    """Return the name of a start's run: SFT and DPO of a model and its rows are other runs than RL."""
    kind = [] if command == "rl" else ["dpo" if start.pairs else "sft"]
    return "-".join((*start.names, *kind))


def show(found: Start, cfg: Any, start: StartOptions) -> None:
    """Print a plan, and the first examples as they are read; write the experiment where that is asked for."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    table = Table("what", "value", "derived from", box=None, pad_edge=False)
    for entry in found.plan.entries:
        table.add_row(*(cell.replace("[", r"\[") for cell in entry))
    console.print(table)
    for number, (prompt, answer) in enumerate(found.examples, 1):
        console.print(f"example {number}: {prompt!r}\n  answer: {answer!r}", markup=False, highlight=False)
    if start.save_experiment is not None:
        from experiments.start.source import save_experiment

        save_experiment(found, cfg, start.save_experiment)
        click.echo(f"experiment: {start.save_experiment}")


def export(start: StartOptions, found: Start | None, run: Path) -> None:
    """Export a finished run where --export says, with a card."""
    if start.export is None:
        return
    from axlearn_like.run.directory import RunDirectory
    from axlearn_like.run.object_store import outgoing
    from experiments.start.card import model_card
    from experiments.start.exported import SavedModel

    path = RunDirectory.attach(run).path
    card = None if found is None else model_card(found, path, shlex.join(["axl", *sys.argv[1:]]))
    with outgoing(Path(start.export), "--export") as folder:
        done = SavedModel.find(path).export(folder, card=card)
    click.echo(f"export: {start.export}, {done.architecture}, {done.nbytes / 1e9:.2f} GB")


def _fields(command: str) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(StartOptions) if one.metadata and (command, one.name) != ("rl", "pairs")]


def _with_recipe(command: str, run: RunOptions, start: StartOptions) -> tuple[RunOptions, StartOptions]:
    """Return the options with those of a YAML file that stands for EXPERIMENT; the command line goes before it."""
    known = {one.name.replace("_", "-"): one.metadata["kind"] for one in _fields(command)}
    known |= {"set": tuple, "apply": tuple, "seed": int, "run-dir": str, "reward": str}
    found = read_recipe(run.experiment or "", known)
    sets, applied = found.pop("set", ()), found.pop("apply", ())
    seed, place = found.pop("seed", None), found.pop("run_dir", None)
    edits = {"sets": (*sets, *run.sets), "applied": (*applied, *run.applied)}
    where = run.run_dir or (None if place is None else Path(place).expanduser())
    run = dataclasses.replace(run, experiment=None, seed=seed if run.seed is None else run.seed, run_dir=where, **edits)
    return run, dataclasses.replace(start, **{key: one for key, one in found.items() if getattr(start, key) is None})
