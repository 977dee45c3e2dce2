"""Notebooks as Jupyter and Colab open them, with what their cells showed: written from examples/notebooks/*.py.

    python -m tests.golden.notebooks [first_run ...] [--repository OWNER/NAME]

The percent files are the source, which tests run; tests compare the cells of both. `--repository` (on GitHub) adds a
badge that opens the notebook on Colab. `your_own` and `first_run` train for minutes, in AXL_NOTEBOOK_RUNS; `read_a_run`
needs pandas, and AXL_NOTEBOOK_RUN.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = ("first_run", "your_own", "read_a_run")
_LARGEST = 150_000  # characters of an output that is kept
_COLAB = "https://colab.research.google.com"

Cell = dict[str, Any]


def cells(text: str) -> Iterator[tuple[str, str]]:
    """Yield (markdown or code, source) of each cell of a file in percent format."""
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            yield "markdown", "\n".join(re.sub("^# ?", "", line) for line in body.strip().splitlines())
        else:
            yield "code", re.sub(r"  # pyright: ignore.*", "", body.strip())


def notebook(found: list[Cell]) -> str:
    """Return a notebook of these cells as text."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "colab": {"provenance": []}}
    whole = {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def badge(name: str, repository: str) -> str:
    """Return the line that opens a notebook on Colab."""
    place = f"{_COLAB}/github/{repository}/blob/main/examples/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({place})"


def executed(name: str, repository: str | None) -> list[Cell]:
    """Run a notebook's cells in this process; returns them with their outputs.

    Raises:
        Any exception of a cell.
    """
    sys.modules["__main__"] = kernel = types.ModuleType("__main__")  # configs name classes of its
    found: list[Cell] = []
    if repository is not None:
        found.append({"cell_type": "markdown", "id": "colab", "metadata": {}, "source": [badge(name, repository)]})
    for number, (kind, source) in enumerate(cells((FOLDER / f"{name}.py").read_text())):
        one: Cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(True)}
        if kind == "code":
            print(f"{name}: cell {number}", file=sys.stderr, flush=True)
            one |= {"execution_count": number, "outputs": list(_outputs(source, vars(kernel), number))}
        found.append(one)
    return found


def _outputs(source: str, scope: dict[str, Any], number: int) -> Iterator[Cell]:
    """Yield what a cell printed, and the value of its last line."""
    printed, value = io.StringIO(), None
    tree = ast.parse(source)
    with contextlib.redirect_stdout(printed):
        last = tree.body[-1]
        shown = isinstance(last, ast.Expr)
        body = ast.Module(tree.body[:-1] if shown else tree.body, [])
        exec(compile(body, f"cell-{number}", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell-{number}", "eval"), scope)
    if text := printed.getvalue().replace(os.environ.get("AXL_NOTEBOOK_RUNS") or "\0", "runs"):
        yield {"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}
    if value is not None:
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
        data = {"text/plain": [repr(value)[:1000]]} if html is None else {"text/html": html.splitlines(True)}
        if html is not None and len(html) > _LARGEST:
            data = {"text/plain": [f"{len(html):,} characters of HTML, which are not stored: run the cell"]}
        yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}


def main() -> None:
    """Write notebooks, each from a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.notebooks")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], default=list(NAMES))
    parser.add_argument("--repository")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        (name,) = given.names
        (FOLDER / f"{name}.ipynb").write_text(notebook(executed(name, given.repository)), encoding="utf-8")
        return
    for name in given.names:
        more = ["--repository", given.repository] if given.repository else []
        subprocess.run([sys.executable, "-m", "tests.golden.notebooks", name, "--here", *more], check=True)


if __name__ == "__main__":
    main()
