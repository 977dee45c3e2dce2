"""`axl verify run`: a published run, made again and compared; `axl verify explain`: how an answer is judged."""

import json
import time
from pathlib import Path

import click

from mesh.errors import UserError, printable
from tools.experiment import LocalPath, text_options


@click.group("verify")
def command() -> None:
    """Verify a published run, or try verifiers on single answers."""


@command.command("run")
@text_options
@click.argument("file", type=LocalPath(path_type=Path, exists=True, dir_okay=False))
@click.option("--updates", type=click.IntRange(1), help="Make this many updates again.  [default: all]")
@click.option(
    "--checkpoint", metavar="RUN@STEP", help="Train nothing: draw rollouts of this checkpoint's version again."
)
@click.option("--rollouts", type=click.IntRange(1), help="With --checkpoint: how many, by chance.  [default: 16]")
@click.option("--seed", type=int, help="Seed of their choice.  [default: another one each time]")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Where this machine has data or a model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _run(
    file: Path,
    updates: int | None,
    checkpoint: str | None,
    rollouts: int | None,
    seed: int | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the run of FILE, from `axl publish`, again in this process, and compare every rollout and version.

    Nothing is kept. The exit status is 1 at the first difference, which is named. Processors of another class round
    differently, and then digests differ although nobody has cheated: both classes are printed.
    """
    if checkpoint is None and (rollouts is not None or seed is not None):
        raise UserError("--rollouts and --seed choose rollouts of one version: name its weights, --checkpoint RUN@STEP")
    if checkpoint is not None and updates is not None:
        raise UserError("--updates makes updates again, and --checkpoint makes none; expected one of them")
    from mesh.imports import many_imports

    with many_imports():
        from axlearn_like.checkpoint.versions import find_version
        from mesh.devices import hardware_class, one_device_per_core
        from mesh.programs.compilation import enable_compilation_cache
        from rl.runtime.published import read_published, redraw_some, remake
        from tools.experiment import apply_edits

    published = read_published(file)
    cfg = published.experiment()
    apply_edits(cfg, sets)
    one_device_per_core()
    enable_compilation_cache()
    began = time.monotonic()
    if checkpoint is None:
        say = lambda line: click.echo(printable(line))  # noqa: E731
        found = remake(published, cfg, updates, say)
    else:
        found = redraw_some(published, cfg, find_version(checkpoint), rollouts or 16, seed)
    seconds = round(time.monotonic() - began, 1)
    if found.difference is None:
        click.echo(f"the same to the bit: {found.rollouts} rollouts, {found.versions} versions, {seconds} s")
    else:
        here, there = hardware_class(), " and ".join(published.hardware)
        rounding = "" if [here] == published.hardware else f"; drawn on {there}, this is {here}: it may be rounding"
        click.echo(printable(f"different: {found.difference}{rounding}"))
    if as_json:
        figures = {"rollouts": found.rollouts, "versions": found.versions, "difference": found.difference}
        click.echo(json.dumps({**figures, "seconds": seconds}))
    if found.difference is not None:
        raise SystemExit(1)


@command.command("explain")
@click.option("--reference", required=True, metavar="TEXT", help="The right answer, as rows of data have it.")
@click.option("--answer", required=True, metavar="TEXT", help="What a policy wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _explain(reference: str, answer: str, as_json: bool) -> None:
    """Print how MathVerifier reads REFERENCE and ANSWER, and why they are equal or not."""
    from rl.verification.verifiers.math import MathVerifier
    from rl.verification.verifiers.self_test import Rows

    rows = Rows.Config(rows=({"question": "", "answer": reference},))
    found, wanted, verdict = MathVerifier(MathVerifier.Config(mixture=rows)).explain(answer, reference)
    if as_json:
        read = {"reference": str(wanted), "answer": str(found)}
        click.echo(json.dumps({**read, "equal": verdict.equal, "reason": verdict.reason}))
        return
    click.echo(f"reference: {wanted}\nanswer:    {found}")
    click.echo(f"{'equal' if verdict.equal else 'not equal'}: {verdict.reason}")
