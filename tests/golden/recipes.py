"""The table of docs/reference/recipes.md, made of what fits.

python -m tests.golden.recipes
"""

import re
from pathlib import Path

from experiments.recipes.fit import Fit
from experiments.recipes.recipes import recipes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"
COMMAND = "python -m tests.golden.recipes"
_MARKS = ("<!-- recipes: begin -->", "<!-- recipes: end -->")
_METHODS = {"full": "full", "bfloat16 moments": "bf16", "lora": "LoRA"}


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


def main() -> None:
    """Write the page's table."""
    begin, end = _MARKS
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{begin}\n{table()}\n{end}", PAGE.read_text()))


if __name__ == "__main__":
    main()
