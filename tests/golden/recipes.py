"""The tables of docs/reference/recipes.md: what fits by arithmetic, and what the compiler says of it.

    axl recipes --check full --machine v5e:2x4 --json > checked.out
    python -m tests.golden.recipes checked.out      # without files: the tables alone

What was compiled is stored in tests/experiments/compiled/recipes.json.
"""

import json
import re
from pathlib import Path
from typing import Any

import click

from experiments.recipes.fit import Fit
from experiments.recipes.recipes import recipes
from mesh.generations import GENERATIONS
from tests.golden.compiles import DIRECTORY, versions

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"
RECORD = DIRECTORY / "recipes.json"
COMMAND = "python -m tests.golden.recipes"
_METHODS = {"full": "full", "bfloat16 moments": "bf16", "lora": "LoRA", "int8 lora": "int8"}
WAY = ("method", "mesh", "rows", "rows_at_once", "remat")  # what must be as it was compiled


def tables() -> dict[str, str]:
    """Tables by the names of their marks."""
    return {"recipes": table(), "compiled": compiled_table()}


def table() -> str:
    """Recipes by machines; memory of CPUs is another on each machine, so they are named alone."""
    machines = list(dict.fromkeys(one for recipe in recipes().values() for one in recipe.machines))
    lines = [f"| | {' | '.join(machines)} |", "|---" * (len(machines) + 1) + "|"]
    for recipe in recipes().values():
        cells = ["-" if one not in recipe.machines else _cell(one, recipe) for one in machines]
        lines.append(f"| `{recipe.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(machine: str, recipe) -> str:
    if machine.startswith("cpu"):
        return "yes"
    found: Fit = recipe.fit(machine)
    of = f"{sum(found.holds.values()) / 1e9:.0f} of {found.machine.memory / 1e9:.0f}"
    fewer = "" if found.rows == recipe.most * recipe.samples else f", {found.rows} rows"
    return f"{_METHODS[found.method]} {of}, {found.seconds:.2g} s{fewer}"


def compiled_table() -> str:
    """A line for each recipe, a column for each TPU machine: what was compiled there, and what was not."""
    found, of = stored(), dict[str, float]()
    machines = list(dict.fromkeys(machine for _, machine in _on_tpus()))
    for row in found.values():
        of[row["machine"]] = max(one["available"] for one in row["compiled"].values()) / 1e9
    heads = [f"{one}, {of[one]:.1f}" if one in of else one for one in machines]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(machines) + 1) + "|"]
    for recipe in recipes().values():
        cells = [_compiled(found.get(f"{recipe.name} {one}")) if one in recipe.machines else "-" for one in machines]
        lines.append(f"| `{recipe.name}` | {' | '.join(cells)} |")
    shares = sorted(peak_share(row) for row in found.values())
    said = f"{len(found)} of {len(_on_tpus())} rows on TPUs are compiled; the trainer's peaks are"
    return "\n".join([*lines, "", f"{said} {shares[0]:.2f} to {shares[-1]:.2f} of the bytes computed."])


def _on_tpus() -> list[tuple[str, str]]:
    """Recipes and machines that a TPU compiler is asked about."""
    pairs = [(recipe.name, machine) for recipe in recipes().values() for machine in recipe.machines]
    return [(name, machine) for name, machine in pairs if machine.partition(":")[0] in GENERATIONS]


def _compiled(row: dict[str, Any] | None) -> str:
    """GB of the programs, in their order; a star: compiled in full."""
    if row is None:
        return "not compiled"
    sizes = ", ".join(f"{one['needed'] / 1e9:.1f}{'*' * (one['level'] == 'full')}" for one in row["compiled"].values())
    return sizes if all(one["fits"] for one in row["compiled"].values()) else f"{sizes}: **does not fit**"


def peak_share(row: dict[str, Any]) -> float:
    """The trainer's peak by the compiler, as a share of what was computed."""
    computed = sum(recipes()[row["name"]].fit(row["machine"]).holds.values())
    return max(one["needed"] for step, one in row["compiled"].items() if step != "decode") / computed


def stored() -> dict[str, dict[str, Any]]:
    """The stored record, in the order of the recipes."""
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    names = [f"{recipe.name} {machine}" for recipe in recipes().values() for machine in recipe.machines]
    return {name: found[name] for name in names if name in found}


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Rows that `axl recipes --check --json` has printed, as they are stored."""
    rows = json.loads(file.read_text().splitlines()[-1])["recipes"]
    kept = [row | {"machine": row["machine"]["text"]} for row in rows if row["compiled"]]
    fields = ("name", "machine", *WAY, "seconds", "compiled")
    found = {f"{row['name']} {row['machine']}": {field: row[field] for field in fields} for row in kept}
    return {name: row | {"versions": versions()} for name, row in found.items()}


@click.command(help=f"Write {RECORD.name} and the tables of {PAGE.name}.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
def main(files: tuple[Path, ...]) -> None:
    """Store what was checked, and write the tables."""
    found = stored()
    for file in files:
        found |= _read(file)
    RECORD.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")
    page = PAGE.read_text()
    for name, text in tables().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        page = pattern.sub(lambda _, b=begin, e=end, t=text: f"{b}\n{t}\n{e}", page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
