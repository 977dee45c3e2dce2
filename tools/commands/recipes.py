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

# Compiled by the quick check: all parameters, LoRA factors, and rollouts on devices of their own.
QUICK = (("qwen3_0_6b_sft", "v6e:1x1"), ("llama32_1b_sft", "v5e:1x1"), ("qwen3_0_6b_rl", "v6e:2x4"))
_PREDICTED = "predicted by arithmetic, 0.5 to 3 times as long by the compiler"


@click.command("recipes")
@click.argument("name", required=False)
@click.option("--model", help="Recipes with this in their names, or in those of their models.")
@click.option("--machine", help="Recipes for this machine, e.g. v5e:2x4, h100:8.")
@click.option("--job", type=click.Choice(["sft", "rl"]))
@click.option(
    "--check",
    type=click.Choice(["quick", "full"]),
    help="Compile three of them, or all that are chosen; exit status 1: not all fit. What is compiled is kept.",
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
    if machine is not None:
        from experiments.recipes.machines import find_machine

        machine = find_machine(machine, "--machine").text  # v5e-8 is v5e:2x4
    quick = [(recipes()[one], there) for one, there in QUICK]
    chosen = quick if check == "quick" else list(_chosen(name, (model or "").lower(), machine, job))
    if not chosen:
        raise UserError("no recipe is for that model, machine and job; `axl recipes` lists all")
    if name is None and check is None and not as_json:
        return _list(chosen)
    rows: list[dict[str, Any]] = []
    try:
        for recipe, there in chosen:
            rows.append(_row(recipe, there) if check is None else _checked(recipe, there))
    except KeyboardInterrupt:
        click.echo(f"stopped after {len(rows)} of {len(chosen)}; the same command goes on", err=True)
    if check is not None:
        _sum_up(rows)
    if as_json:
        click.echo(json.dumps({"recipes": rows, "seconds": _PREDICTED}))
    if len(rows) < len(chosen):
        click.get_current_context().exit(130)
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


def _row(recipe: Recipe, machine: str) -> dict[str, Any]:
    """Return a recipe on a machine as JSON-able data, and print it as it comes."""
    found = recipe.fit(machine)
    row = {"name": recipe.name, "model": recipe.model, "command": recipe.command(found), **dataclasses.asdict(found)}
    row["machine"] = {field: row["machine"][field] for field in ("text", "count", "memory", "source")}
    row |= {"fits": True, "compiled": None}
    _print(row, found)
    return row


def _checked(recipe: Recipe, machine: str) -> dict[str, Any]:
    """Return `_row` with what the compiler says; the others go on where this recipe is refused."""
    try:
        row, found = _row(recipe, machine), recipe.fit(machine)
    except UserError as error:
        click.echo(f"{recipe.name} on {machine} does not fit: {error}")
        return {"name": recipe.name, "machine": {"text": machine}, "fits": False, "compiled": None}
    if found.machine.topology is None:
        return row
    from tools.aot.recipes import compiled_memory

    row["compiled"] = {}
    for step, one in compiled_memory(recipe, found):
        row["compiled"][step], row["fits"] = one, row["fits"] and one["fits"]
        verdict = "fits" if one["fits"] else "does not fit"
        sizes = f"{one['needed'] / 1e9:.1f} of {one['available'] / 1e9:.1f} GB"
        click.echo(f"  {step}, compiled ({one['level']}): {verdict}, {sizes}")
    return row


def _sum_up(rows: list[dict[str, Any]]) -> None:
    """Print how many are compiled, how many arithmetic alone, which do not fit, and peaks beside the arithmetic."""
    done = [row for row in rows if row["compiled"] is not None]
    wrong = [f"{row['name']} on {row['machine']['text']}" for row in rows if not row["fits"]]
    fits = sum(row["fits"] for row in done)
    alone = sum(row["fits"] for row in rows) - fits
    said = f"{len(done)} compiled, {fits} fit" + f"; {alone} fit by arithmetic alone" * bool(alone)
    click.echo(said + "".join(f"; not {one}" for one in wrong))
    peaks = [max(row["compiled"][s]["needed"] for s in ("train", "score") if s in row["compiled"]) for row in done]
    if shares := sorted(peak / sum(row["holds"].values()) for peak, row in zip(peaks, done, strict=True)):
        click.echo(f"peaks of trainers: {shares[0]:.2f} to {shares[-1]:.2f} of the bytes computed")


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
