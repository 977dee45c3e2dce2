"""`axl replay RUN --update N`: an update of a past run, made again, and what it would have been."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError, once, printable
from tools.experiment import LocalPath, apply_edits, text_options

if TYPE_CHECKING:
    from rl.runtime.replay.record import RunRecord
    from rl.runtime.replay.update import Replay


@click.command("replay")
@text_options
@click.argument("run", metavar="RUN", type=LocalPath(path_type=Path, exists=True, file_okay=False))
@click.option("--update", type=click.IntRange(min=1), required=True, help="Number of the update: N makes version N.")
@click.option("--since", type=click.IntRange(min=0), help="Begin at a checkpoint of at most so many updates, and "
              "compare all versions from there; 0: the start.  [default: the nearest before N]")  # fmt: skip
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Make it once more with another value of a "
              "field of objective, learner or trainer. May be repeated.")  # fmt: skip
@click.option(
    "--drop", "dropped", multiple=True, metavar="PROMPT:SAMPLE", help="... without a sample. May be repeated."
)
@click.option("--reward", "rewards", multiple=True, metavar="PROMPT:SAMPLE=NUMBER", help="... with another reward. May "
              "be repeated.")  # fmt: skip
@click.option("--trace", type=LocalPath(path_type=Path, dir_okay=False), help="Write all that the update was made of "
              "into this file, for axl bisect on another machine.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def command(
    run: Path,
    update: int,
    since: int | None,
    sets: tuple[str, ...],
    dropped: tuple[str, ...],
    rewards: tuple[str, ...],
    trace: Path | None,
    as_json: bool,
) -> None:
    """Make update N of the RL run in RUN again, from the nearest checkpoint before it, and compare it with its record.

    Weights, batch and metrics must be the same to the bit; the exit status is 1 if they are not. With --set, --drop or
    --reward the update is made once more with these changes, and what differs is printed. Nothing is written to RUN.
    PROMPT is the number of a problem; a wrong one is answered with those of the update.
    """
    left = frozenset(_sample("--drop", one) for one in dropped)
    given = once("--reward", map(_reward, rewards))
    if both := left & given.keys():
        raise UserError("--drop and --reward are both of sample {}:{}; expected one of them".format(*min(both)))
    from mesh.imports import many_imports

    with many_imports():
        from rl.runtime.replay.record import RunRecord
        from rl.runtime.replay.update import Changes, replay

    record = RunRecord(run)
    prepare()
    changes = Changes(partial(apply_edits, sets=sets) if sets else None, given, left)
    done = replay(record, update, changes, since=since, deep=trace is not None, beat=beat)
    if trace is not None:
        done.write(trace)
    if as_json:
        click.echo(json.dumps(described(record, done)))
    else:
        _show(record, done, trace)
    if done.unequal is not None:
        click.get_current_context().exit(1)


def prepare() -> None:
    """Use the devices and the compiled programs as `axl rl` does."""
    from mesh.devices import one_device_per_core
    from mesh.programs.compilation import enable_compilation_cache

    one_device_per_core()
    enable_compilation_cache()


def beat(made: int, wanted: int) -> None:
    """Say how far a replay is, on standard error."""
    click.echo(f"update {made} of {wanted} is made again", err=True)


def described(record: RunRecord, done: Replay) -> dict[str, Any]:
    """Return everything that `--json` prints."""
    update, version = done.update, done.versions.get(done.update)
    found: dict[str, Any] = {"run": str(record.path), "update": update, "from": done.start, "version": version}
    found |= {"equal": done.unequal is None, "recorded": record.versions.get(update, {}).get("checksum")}
    if done.unequal is not None:
        number, parts = done.unequal
        found["unequal"] = {"update": number, **{part.part: list(part.what) for part in parts}}
    found["metrics"] = done.trace.metrics
    if done.changed is not None:
        found |= {"changed": _differing(done), "movement": done.movement()}
    return found


def _differing(done: Replay) -> dict[str, tuple[Any, Any]]:
    """Return {metric: (as it was, with the changes)} of those that differ."""
    assert done.changed is not None, "asked for with changes"
    a, b = done.trace.metrics, done.changed.metrics
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}


def _show(record: RunRecord, done: Replay, trace: Path | None) -> None:
    from rich.console import Console

    from tools.report.cards import Sheet

    begin = f"the checkpoint of update {done.start}" if done.start else "its start"
    where = f"update {done.update} of {record.path.name}, made again from {begin}"
    if done.unequal is None:
        marks = "batch, " if "drawn" in record.batches.get(done.update, {}) else ""
        click.echo(f"{where}: {marks}metrics and weights are equal to the bit (version {done.versions[done.update]})")
    else:
        number, parts = done.unequal
        names = "; ".join(f"{p.part} ({', '.join(map(str, p.what[:4])) or 'which is not known'})" for p in parts)
        click.echo(printable(f"{where}: NOT EQUAL at update {number} in {names}"))
        for line in _elsewhere(record):
            click.echo(printable(line))
    if done.changed is not None:
        rows = [(name, _number(a), _number(b)) for name, (a, b) in _differing(done).items()]
        Console().print(Sheet("with the changes", ("metric", "as it was", "changed"), rows, (1, 2)).terminal(100))
        moved = done.movement()
        cosine = f"{moved['cosine']:.6f}" if "cosine" in moved else "not defined"
        click.echo(f"the update's norm: {moved['norm']:.6g}, changed {moved['changed_norm']:.6g}; cosine {cosine}")
    if trace is not None:
        click.echo(printable(f"trace: {trace}"))


def _elsewhere(record: RunRecord) -> list[str]:
    """Return a line for each thing that decides bits and was another when the run was made."""
    from mesh.devices import compilers

    here, there = compilers(), record.compilers[-1] if record.compilers else {}
    return [
        f"  {name}: {there[name]!r} then, {here[name]!r} here"
        for name in here
        if there.get(name, here[name]) != here[name]
    ]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


def _sample(option: str, text: str) -> tuple[int, int]:
    prompt, colon, sample = text.partition(":")
    if not (colon and prompt.isdecimal() and sample.isdecimal()):
        raise UserError(f"{option} {text!r}: expected PROMPT:SAMPLE, two numbers such as 17:3")
    return int(prompt), int(sample)


def _reward(text: str) -> tuple[tuple[int, int], float]:
    sample, equals, number = text.partition("=")
    try:
        value = float(number) if equals else float("nan")
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise UserError(f"--reward {text!r}: expected PROMPT:SAMPLE=NUMBER, such as 17:3=1.0")
    return _sample("--reward", sample), value
