"""`axl bisect A B`: the first event, token, layer and array at which two runs differ."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.errors import UserError, printable
from tools.commands.runs.replay import beat, prepare
from tools.experiment import LocalPath, text_options

if TYPE_CHECKING:
    from rl.runtime.replay.bisect import Located, Tracer
    from rl.runtime.replay.record import RunRecord
    from rl.runtime.replay.update import Replay

_RUN = LocalPath(path_type=Path, exists=True, file_okay=False)
_FILE = LocalPath(path_type=Path, exists=True, dir_okay=False)


@click.command("bisect")
@text_options
@click.argument("a", metavar="A", type=_RUN)
@click.argument("b", metavar="B", type=_RUN)
@click.option("--trace-a", type=_FILE, help="File of axl replay A --trace, made where A was made.")
@click.option("--trace-b", type=_FILE, help="File of axl replay B --trace, made where B was made.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def command(a: Path, b: Path, trace_a: Path | None, trace_b: Path | None, as_json: bool) -> None:
    """Find the first event, token, layer and array at which the RL runs in A and B differ, and say so.

    First by the records of all updates, then by making the first differing update again in both, each with the
    XLA_FLAGS of its run. With a trace, the update is that of the trace, and what it holds is compared. Nothing is
    written to A or B.
    """
    from mesh.imports import many_imports

    with many_imports():
        from rl.runtime.replay.bisect import bisect, config_differences
        from rl.runtime.replay.record import RunRecord

    records = RunRecord(a), RunRecord(b)
    differing = config_differences(*records)
    prepare()
    given = [None if path is None else _read(path) for path in (trace_a, trace_b)]
    updates = {one.update for one in given if one is not None}
    if len(updates) > 1:
        raise UserError(f"--trace-a and --trace-b are of updates {' and '.join(map(str, sorted(updates)))}")
    if not updates and a.resolve() == b.resolve():
        raise UserError("axl bisect: the same run twice; expected two, or a trace of another machine (--trace-b)")
    one, other = (_tracer(record, trace) for record, trace in zip(records, given, strict=True))
    words = records[0].config().tokenizer.build()
    text = lambda tokens: words.decode(list(tokens))  # noqa: E731
    found = bisect(*records, one, other, text, next(iter(updates), None))
    if as_json:
        whole = None if found is None else dataclasses.asdict(found)
        click.echo(json.dumps({"a": str(a), "b": str(b), "configs": differing, "located": whole}))
    else:
        _show(records, differing, found)
    if found is not None:
        click.get_current_context().exit(1)


def _read(path: Path) -> Replay:
    from rl.runtime.replay.update import Replay

    return Replay.read(path)


def _tracer(record: RunRecord, given: Replay | None) -> Tracer:
    """Return what makes an update again: here, or in a process with the run's XLA_FLAGS; or reads what was given."""
    from rl.runtime.replay.update import replay

    def trace(update: int, since: int) -> Replay:
        if given is not None:
            if given.update != update:
                raise UserError(f"the runs differ at update {update} already; make traces of that: --update {update}")
            return given
        flags = (record.compilers[-1].get("xla_flags") if record.compilers else None) or ""
        if flags == os.environ.get("XLA_FLAGS", ""):
            return replay(record, update, since=since, deep=True, beat=beat)
        return _elsewhere(record.path, update, since, flags)

    return trace


def _elsewhere(run: Path, update: int, since: int, flags: str) -> Replay:
    """Make an update again in a process with other XLA_FLAGS (UserError: it fails)."""
    from axlearn_like.run.scratch import scratch
    from rl.runtime.replay.update import Replay

    with scratch("bisect") as folder:
        file = folder / "trace.npz"
        words = ["replay", str(run), "--update", str(update), "--since", str(since), "--trace", str(file)]
        click.echo(printable(f"{run.name} with XLA_FLAGS={flags!r}:"), err=True)
        done = subprocess.run(
            [sys.executable, "-m", "axlearn_like", *words],
            env={**os.environ, "XLA_FLAGS": flags},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not file.is_file():
            raise UserError(f"axl {' '.join(words[:4])} with XLA_FLAGS={flags!r} has failed (status {done.returncode})")
        return Replay.read(file)


def _show(
    records: tuple[RunRecord, RunRecord], differing: dict[str, tuple[str | None, str | None]], found: Located | None
) -> None:
    from rich.console import Console

    from rl.runtime.replay.compare import STAGES
    from tools.report.cards import Sheet

    console = Console()
    if differing:
        rows = [
            (path or "(root)", *("-" if side is None else side for side in sides)) for path, sides in differing.items()
        ]
        console.print(Sheet("where the configs differ", ("config", "A", "B"), rows).terminal(100))
        click.echo("")
    if found is None:
        both = sorted({*records[0].updates} & {*records[1].updates})
        click.echo(f"nothing that both have recorded differs: updates {both[0]} to {both[-1]}" if both else "no update")
        return
    click.echo(printable(f"The runs part at update {found.update}: {STAGES[found.event]}. {found.said}"))
    for side in found.stray if found.stages else ():
        click.echo(f"The update of {side} has not come out as recorded: what follows is of both as they are made here.")
    if found.stages:
        unequal = {one.stage: one for one in found.stages}
        rows = []
        for stage, words in STAGES.items():
            if (one := unequal.get(stage)) is None:
                rows.append((words, "equal", "", ""))
            else:
                place = f"{one.name}{list(one.index) if one.index else ''}"
                far = "" if one.ulps is None or one.ulps >= 1 << 16 else f" ({one.ulps} ulp)"
                rows.append((words, f"{one.arrays} differ", place, f"{one.sides[0]} | {one.sides[1]}{far}"))
        console.print("", Sheet(f"update {found.update}", ("", "", "first", "A | B"), rows).terminal(100))
