"""`axl recipes`: models by job and machine, how each is run there, and whether the compiler agrees."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from experiments.recipes.recipes import Recipe, recipes
from mesh.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from experiments.recipes.fit import Fit

# Compiled by the quick check, each on the smallest machine that it fits.
QUICK = (("qwen3_0_6b_sft", "v5e:1x1"), ("gemma3_1b_sft", "v6e:1x1"), ("qwen3_0_6b_rl", "v6e:1x1"))
_PREDICTED = "predicted by arithmetic, 0.5 to 2 times as long by the compiler"


@click.command("recipes")
@click.argument("name", required=False)
@click.option("--model", help="Recipes with this in their names, or in those of their models.")
@click.option("--machine", help="Recipes for this machine, e.g. v5e:2x4, h100:8.")
@click.option("--job", type=click.Choice(["sft", "rl"]))
@click.option(
    "--check", type=click.Choice(["quick", "full"]), help="Compile them, three or all; exit status 1: not all fit."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def command(
    name: str | None, model: str | None, machine: str | None, job: str | None, check: str | None, as_json: bool
) -> None:
    """List recipes, or show NAME on its machines: command, mesh, memory of a device, predicted seconds of a step.

    TPUs are checked by their compiler (the extra `aot`), GPUs and CPUs by arithmetic alone.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator is taken
    if name is not None and name not in recipes():
        raise UserError(f"no recipe {name!r}{did_you_mean(name, recipes())}")
    quick = [(recipes()[one], there) for one, there in QUICK]
    chosen = quick if check == "quick" else list(_chosen(name, (model or "").lower(), machine, job))
    if not chosen:
        raise UserError("no recipe is for that model, machine and job; `axl recipes` lists all")
    if name is None and check is None and not as_json:
        return _list(chosen)
    rows = [_row(recipe, there, compiled=check is not None, say=not as_json) for recipe, there in chosen]
    if as_json:
        click.echo(json.dumps({"recipes": rows, "seconds": _PREDICTED}))
    if not all(row["fits"] for row in rows):
        click.get_current_context().exit(1)


def _chosen(name: str | None, model: str, machine: str | None, job: str | None) -> Iterator[tuple[Recipe, str]]:
    for recipe in recipes().values():
        named = name in (None, recipe.name) and model in f"{recipe.name} {recipe.model}".lower()
        if named and job in (None, recipe.job):
            there = (machine,) if machine and name else recipe.machines  # any machine may be asked for one recipe
            yield from ((recipe, one) for one in there if machine in (None, one))


def _list(chosen: list[tuple[Recipe, str]]) -> None:
    for recipe in dict.fromkeys(recipe for recipe, _ in chosen):
        machines = " ".join(there for other, there in chosen if other is recipe)
        click.echo(f"{recipe.name:<18} {recipe.model:<14} {recipe.job:<4} {machines}")


def _row(recipe: Recipe, machine: str, *, compiled: bool, say: bool) -> dict[str, Any]:
    """Return a recipe on a machine as JSON-able data, and print it as it comes."""
    found = recipe.fit(machine)
    row = {"name": recipe.name, "model": recipe.model, "command": recipe.command(found), **dataclasses.asdict(found)}
    row["machine"] = {field: row["machine"][field] for field in ("text", "count", "memory", "source")}
    row |= {"fits": True, "compiled": None}
    if say:
        _print(row, found)
    if compiled and found.machine.topology is not None:
        from tools.aot.recipes import compiled_memory

        row["compiled"] = compiled_memory(recipe, found)
        row["fits"] = all(one["fits"] for one in row["compiled"].values())
        for step, one in row["compiled"].items() if say else ():
            verdict = "fits" if one["fits"] else "does not fit"
            click.echo(f"  {step}, compiled: {verdict}, {one['needed'] / 1e9:.1f} of {one['available'] / 1e9:.1f} GB")
    return row


def _print(row: dict[str, Any], found: Fit) -> None:
    click.echo(f"{row['name']} on {found.machine.text}: {row['command']}")
    at_once = f"{found.rows} rows a step, {found.rows_at_once} at a time on each part of {found.mesh}"
    click.echo(f"  {found.method}, remat {found.remat}; {at_once}")
    click.echo(f"  trainer: {found.why}")
    if found.engines is not None:
        from experiments.recipes.fit import arithmetic

        engines = found.engines
        kind = "int8" if engines.int8 else "bfloat16"
        what = f"{engines.workers} with mesh {engines.mesh}, {engines.sequences} sequences each, {kind} weights"
        click.echo(f"  engines: {what}: {arithmetic(engines.holds)}")
    if found.seconds is not None:
        click.echo(f"  {found.seconds:.3g} s a step ({_PREDICTED})")
