"""`axl doctor`: what this machine is, and whether the stack works on it."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import printable
from tools.commands.bench.options import names_in
from tools.experiment import LocalPath, Number

if TYPE_CHECKING:
    from tools.bench.doctor.checks import Finding


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON: ok, checks, machine, versions, date.")
@click.option("--only", default="", metavar="NAMES", help="Comma-separated checks; default: all.")
@click.option("--quick", is_flag=True, help="Leave out what measures and computes: half a minute.")
@click.option("--run-dir", type=LocalPath(path_type=Path), default="runs", show_default=True, help="Disk to look at.")
@click.option("--bucket", metavar="URL", help="Try an object of its own there: gs://NAME/FOLDER.")
@click.option("--seconds", type=Number(1), default=480.0, show_default=True, help="Deadline of all checks.")
@click.pass_context
def command(
    context: click.Context,
    as_json: bool,
    only: str,
    quick: bool,
    run_dir: Path,
    bucket: str | None,
    seconds: float,
) -> None:
    """Check this machine and the stack on it: versions, devices, speed, kernels, a step of training and of RL.

    Exit status: 0 if nothing failed (warnings are none), 1 if a check failed. Nothing leaves this machine but for
    --bucket. docs/reference/doctor.md says what each check means.
    """
    from tools.bench.doctor.checks import Finding, choose_checks
    from tools.bench.doctor.run import run_checks
    from tools.bench.harness.circumstances import machine

    checks = choose_checks(names_in(only), quick=quick, bucket=bucket is not None)
    options = {"run_dir": str(run_dir), "bucket": bucket, "debug": os.environ.get("AXL_DEBUG", "0") not in ("", "0")}
    found: dict[str, Finding] = {}
    stopped = False
    try:
        for name, finding in run_checks(checks, options, seconds):
            found[name] = finding
            if not as_json:
                _print_row(name, finding)
    except KeyboardInterrupt:
        stopped = True
        found |= {name: Finding("skip", "interrupted") for name in checks if name not in found}
    failed = sum(one.status == "fail" for one in found.values())
    if as_json:
        click.echo(json.dumps(_described(found, machine(), ok=not failed and not stopped)))
    else:
        warned = sum(one.status == "warn" for one in found.values())
        click.echo(f"{len(found)} checks, failed: {failed}, warnings: {warned}" + ", interrupted" * stopped)
    if stopped:
        raise KeyboardInterrupt
    context.exit(1 if failed else 0)


def _print_row(name: str, found: Finding) -> None:
    """Print one row of the table, and below it what to do."""
    width = max(60, min(160, shutil.get_terminal_size((120, 24)).columns)) - 26
    lines = textwrap.wrap(printable(found.value), width) + textwrap.wrap(
        printable(found.do), width, initial_indent="-> "
    )
    word = found.status.upper() if found.status in ("warn", "fail") else found.status
    for number, line in enumerate(lines):
        click.echo(f"{name:<17} {word:<6} {line}" if not number else f"{'':<24} {line}")


def _described(found: dict[str, Finding], machine: dict[str, Any], *, ok: bool) -> dict[str, Any]:
    """Return everything that `--json` prints."""
    from tools.bench.doctor.host import shown_versions

    checks = [{"name": name, **one._asdict()} for name, one in found.items()]
    devices = found["devices"].figures if "devices" in found else {}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"ok": ok, "checks": checks, "machine": {**machine, **devices}, "versions": shown_versions(), "date": date}
