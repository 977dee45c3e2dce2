"""The result of a benchmark as tables on the console, under the keys that the docs explain and `--json` prints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table as RichTable

_ABOUT = ("bench", "quick", "errors", "missing", "machine", "date", "versions", "command")
_MOST_ROWS = 20  # rows of a list; longer ones are shown by --json alone


class Table(NamedTuple):
    """A table of cells as text; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table for each group of records with common keys, and one of all other figures; no lists of numbers."""
    found: list[Table] = []
    single: list[tuple[str, str]] = []

    def visit(path: str, value: Any) -> None:
        if isinstance(value, list) and len(value) <= _MOST_ROWS:
            value = {str(at): one for at, one in enumerate(value) if isinstance(one, dict)}
        if isinstance(value, list):
            return
        if not isinstance(value, dict):
            single.append((path, cell(value)))
            return
        records = {name: leaves(one) for name, one in value.items() if isinstance(one, dict)}
        if len(records) > 1 and set.intersection(*map(set, records.values())):
            columns = list(dict.fromkeys(column for record in records.values() for column in record))
            rows = [[name, *(cell(one.get(column, "")) for column in columns)] for name, one in records.items()]
            found.append(Table(path or result["bench"], ["", *columns], rows))
            value = {name: one for name, one in value.items() if name not in records}
        for name, one in value.items():
            visit(f"{path}.{name}" if path else name, one)

    visit("", {key: value for key, value in result.items() if key not in _ABOUT})
    return [*found, Table("figures", ("", "value"), single)] if single else found


def show(result: Mapping[str, Any]) -> None:
    """Print the tables of a result, its circumstances and what could not be measured."""
    console = Console()
    for title, columns, rows in tables(result):
        table = RichTable(title=title)
        for at, name in enumerate(columns):
            table.add_column(name, justify="right" if at else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    where = result["machine"]
    click.echo(f"{where['cores']} cores, {where['cpu']}, load {where['load']}")
    for name in result.get("errors", ()):
        click.secho(f"not measured: {name} (reason above)", fg="yellow")
    for name in result.get("missing", ()):
        click.secho(f"missing: {name} (interrupted)", fg="yellow")


def leaves(value: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the figures of nested records, without lists, by their paths."""
    found: dict[str, Any] = {}
    for name, one in value.items():
        if isinstance(one, dict):
            found |= leaves(one, f"{prefix}{name}.")
        elif not isinstance(one, list):
            found[f"{prefix}{name}"] = one
    return found


def cell(value: Any) -> str:
    """Return a figure as text, with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)
