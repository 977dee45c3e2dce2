"""Options that several benchmarks share, progress on standard error, and how a result is printed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
quick_option = click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")


def names_in(listed: str) -> list[str]:
    """Return the names of a comma-separated list."""
    return [name.strip() for name in listed.split(",") if name.strip()]


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows lines on standard error; rounds replace each other."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(line: str) -> None:
            if line.startswith("round"):
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False)

        yield say


def report(result: dict[str, Any], as_json: bool, *, failed: bool) -> None:
    """Print a result, and exit with status 1 if a part of it `failed`."""
    from tools.bench.harness.show import show

    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    if failed:
        raise SystemExit(1)
