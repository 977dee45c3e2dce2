"""Search for the best step that fits: mesh shapes x remat presets x microbatches."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from axlearn_like.config import ConfigBase
from axlearn_like.config_text import to_text
from mesh.ahead_of_time import compile_step, memory_per_device
from mesh.errors import UserError
from mesh.topology import Topology, topology_devices
from tools.aot.candidates import Candidate, candidates
from tools.aot.memory import at_least
from tools.aot.report import describe_topology, report_dict
from tools.aot.steps import find_step
from tools.experiment import config_errors

Row = dict[str, Any]


def run_sweep(
    cfg: ConfigBase[Any],
    topology: Topology,
    *,
    limit: int,
    cache: Path | None,
    options: Mapping[str, str] | None,
    as_json: bool,
) -> list[Row]:
    """Compile the most promising candidates, print the ranking, and return it, the best first.

    Args:
        cfg: of the experiment.
        topology: to compile for.
        limit: compilations at most; those that the cache knows do not count.
        cache: JSON lines, one for each candidate that was tried; a later sweep goes on from there.
        options: of the compiler.
        as_json: print one JSON object instead of a table.

    Raises:
        UserError: nothing can be tried.
    """
    available = memory_per_device(topology)
    tried = candidates(cfg, topology, available)
    if not tried:
        raise UserError(
            f"--sweep: no mesh of {topology.devices} devices divides the batch and the model's heads and has room for "
            "its parameters; change the batch, or take a larger topology"
        )
    known = _read(cache)
    rows: list[Row] = []
    compiled = 0
    for candidate in tried:
        if compiled >= limit:
            break
        key = _key(cfg, topology, candidate, options)
        row = known.get(key)
        if row is None:
            row = _try(cfg, topology, candidate, available, options)
            compiled += row["compiled"]
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps({"key": key, **row}) + "\n")
        rows.append(row)
        click.echo(f"{compiled}/{limit} {candidate}: {_verdict(row)}", err=True)
    rows.sort(key=lambda row: (not row["fits"], row["estimated_step_s"] or 0.0, row["needed"] or 0))
    if as_json:
        result = {**describe_topology(topology), "available": available, "candidates": len(tried), "tried": rows}
        click.echo(json.dumps({**result, "best": rows[0] if rows[0]["fits"] else None}))
    else:
        _print(rows, available)
    return rows


def _try(
    cfg: ConfigBase[Any],
    topology: Topology,
    candidate: Candidate,
    available: int,
    options: Mapping[str, str] | None,
) -> Row:
    row: Row = {
        "mesh": candidate.mesh,
        "remat": candidate.remat,
        "microbatches": candidate.microbatches,
        "set": [f"{path}={value}" for path, value in candidate.edits(cfg).items()],
        "fits": False,
        "compiled": False,
        "needed": None,
        "estimated_step_s": None,
        "mfu_estimate": None,
        "exposed_s": None,
        "why": None,
    }
    try:
        with config_errors(building=True):
            step = find_step(candidate.applied(cfg), "train", topology_devices(topology))
            least = _least(step)
            if least > available:
                return {**row, "needed": least, "why": "arguments and what is kept for the backward pass"}
            found = compile_step(step.name, step.trace, step.mesh, topology, options)
    except UserError as error:
        return {**row, "why": str(error)}
    report = report_dict(step, found)
    if not report["fits"]:
        return {**row, "compiled": True, "needed": report["oom"]["needed"], "why": report["oom"]["what"]}
    names = ("estimated_step_s", "mfu_estimate", "exposed_s", "compile_cpu_s")
    return {**row, "fits": True, "compiled": True, "needed": report["hbm"]["peak"], **{n: report[n] for n in names}}


def _least(step: Any) -> int:
    import jax

    with jax.set_mesh(step.mesh):
        return at_least(step.trace().jaxpr)


def _verdict(row: Row) -> str:
    needed = "" if row["needed"] is None else f"{row['needed'] / (1 << 30):.2f} GiB"
    if row["fits"]:
        return f"fits in {needed}, estimated {row['estimated_step_s']:.4g} s"
    how = "" if row["compiled"] else " (not compiled)"
    return f"does not fit{how}: {needed} {row['why']}"


def _print(rows: list[Row], available: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mesh", "remat", "microbatches", "GiB", "step, s", "MFU", "exposed, s", box=None, pad_edge=False)
    for row in rows:
        mesh = " x ".join(f"{name} {size}" for name, size in row["mesh"].items())
        gib = "" if row["needed"] is None else f"{row['needed'] / (1 << 30):.2f}"
        times = ("", "", "")
        if row["fits"]:
            times = (f"{row['estimated_step_s']:.4g}", f"{row['mfu_estimate']:.0%}", f"{row['exposed_s']:.4g}")
        table.add_row(mesh, row["remat"], str(row["microbatches"]), gib if row["fits"] else f"{gib} no", *times)
    Console().print(table)
    best = rows[0]
    if best["fits"]:
        click.echo("best: " + " ".join(f"--set '{one}'" for one in best["set"]))
    else:
        click.echo(f"nothing that was tried fits {available / (1 << 30):.2f} GiB; raise --sweep-limit or the topology")


def _key(cfg: ConfigBase[Any], topology: Topology, candidate: Candidate, options: Mapping[str, str] | None) -> str:
    parts = [to_text(candidate.applied(cfg)), str(topology), json.dumps(dict(options or {}), sort_keys=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(cache: Path | None) -> dict[str, Row]:
    if cache is None or not cache.exists():
        return {}
    rows = [json.loads(line) for line in cache.read_text().splitlines() if line.endswith("}")]
    return {row.pop("key"): row for row in rows}
