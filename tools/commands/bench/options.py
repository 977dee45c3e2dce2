"""Options that several benchmarks share, progress on standard error, how a result is printed; a command of sections."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, override

import click

from tools.commands.bench.group import command, find_benchmark

_ENDS = "Figures are shown as they come. Ctrl-C ends it with those that there are, and names the missing sections."
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
quick_option = click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")


class _Sections(click.Option):
    """Names of sections, checked and explained by the benchmark of the command's name."""

    @override
    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        listed = ", ".join(f"{name} ({seconds:g} s)" for name, seconds in _sections_of(ctx).items())
        self.help = f"Parts to measure: {listed}; seconds on two idle cores. Default: all."
        return super().get_help_record(ctx)

    @override
    def process_value(self, ctx: click.Context, value: Any) -> list[str]:
        from tools.bench.harness.sections import find_sections

        return find_sections(names_in(super().process_value(ctx, value)), _sections_of(ctx))


def _sections_of(ctx: click.Context) -> Mapping[str, float]:
    return find_benchmark(ctx.command.name or "").SECTIONS


sections_option = click.option("--sections", "sections", cls=_Sections, default="", metavar="NAMES")


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
    """Print a result; exit with status 130 if Ctrl-C left some of it `missing`, with 1 if a part of it `failed`."""
    from tools.bench.harness.show import show

    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    if result.get("missing"):
        raise SystemExit(130)
    if failed:
        raise SystemExit(1)


def add_sectioned(name: str, says: str, failed: Callable[[Mapping[str, Any]], bool] = lambda result: False) -> None:
    """Add the command of a benchmark whose module has `SECTIONS` and `run(sections, say, quick=...)`.

    Args:
        name: its name.
        says: what it measures, as help says it.
        failed: True for a result that ends with status 1.
    """

    @command.command(name=name, help=f"{says}\n\n{_ENDS}")
    @sections_option
    @quick_option
    @json_option
    def measure(sections: list[str], quick: bool, as_json: bool) -> None:
        bench = find_benchmark(name)
        with progress() as say:
            result = bench.run(sections, say, quick=quick)
        report(result, as_json, failed=failed(result))
