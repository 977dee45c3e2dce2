"""`axl aot EXPERIMENT`: compile a step of an experiment for TPUs without having any, and report what it needs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.registry import check_name
from mesh.errors import UserError, once
from tools.commands import options_as
from tools.experiment import LocalPath, edit_options

if TYPE_CHECKING:
    from axlearn_like.config import ConfigBase
    from mesh.topology import Topology

STEP_HELP = (
    "What to compile: train, eval, score, prefill or decode; of elastic training, whose train is a part of a batch, "
    "also update; of packed rows also train_LENGTH and update; of PPO critic and values; of a reference policy "
    "reference (of its penalty reference_rollouts, of an exact KL reference_states)."
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The experiment that is compiled, and the TPUs."""

    experiment: str
    applied: tuple[str, ...]
    sets: tuple[str, ...]
    topology_text: str
    slices: int


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of a sweep."""

    sweep: bool
    sweep_limit: int
    sweep_cache: Path | None


@click.command("aot")
@edit_options
@click.option("--topology", "topology_text", required=True, help="Generation and chips, e.g. v5p:8x8x16, or v5p-2048.")
@click.option("--slices", default=1, show_default=True, help="Slices of that topology, joined by the network.")
@click.option("--step", default="train", show_default=True, help=STEP_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--sweep", is_flag=True, help="Search mesh shapes, remat and microbatches for the best step that fits.")
@click.option("--sweep-limit", default=12, show_default=True, type=click.IntRange(1), help="Compilations of a sweep.")
@click.option("--sweep-cache", type=LocalPath(path_type=Path, dir_okay=False), help="Rows by which a sweep goes on.")
@click.option("--hlo", type=LocalPath(path_type=Path, dir_okay=False), help="Write the optimised program's text.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Compiler option. May be repeated.")
@options_as(target=Target, search=Search)
def command(
    target: Target,
    search: Search,
    step: str,
    as_json: bool,
    hlo: Path | None,
    options: tuple[str, ...],
) -> None:
    """Compile a step of EXPERIMENT for a TPU topology, with no TPU, and say what it needs.

    A step that does not fit is a verdict, with exit status 0; what cannot be is refused before anything is compiled.
    """
    check_name(target.experiment)
    if search.sweep and (hlo or step != "train"):
        raise UserError("--sweep searches for a train step; give --hlo or another --step without it")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else jax would look for a TPU
    from mesh.topology import parse_topology, prepare_compiler

    topology = parse_topology(target.topology_text, target.slices)
    prepare_compiler()
    from tools.aot.run import compile_experiment, load_for

    cfg = load_for(target.experiment, target.sets, topology, target.applied)
    chosen = once("--option", ((name, value) for name, _, value in (option.partition("=") for option in options)))
    if search.sweep:
        return _sweep(cfg, topology, target, search, chosen, as_json=as_json)
    outcome = compile_experiment(cfg, step, topology, chosen)
    from tools.aot.table import advice, print_report

    report = {"experiment": target.experiment, **outcome.report, "advice": advice(cfg, outcome)}
    if not as_json:
        print_report(report, report["advice"])
    if hlo and outcome.compiled.executable is not None:
        hlo.write_text(outcome.compiled.executable.as_text() or "")
    if as_json:
        click.echo(json.dumps(report))


def _sweep(
    cfg: ConfigBase[Any], topology: Topology, target: Target, search: Search, options: dict[str, str], *, as_json: bool
) -> None:
    from tools.aot.sweep import print_sweep, run_sweep

    found = run_sweep(cfg, topology, limit=search.sweep_limit, cache=search.sweep_cache, options=options)
    result = {"experiment": target.experiment, "apply": target.applied, "set": target.sets, **found}
    click.echo(json.dumps(result)) if as_json else print_sweep(result)
