"""Search for the best step that fits: mesh shapes x remat presets x microbatches."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console
from rich.table import Table

from axlearn_like.config import ConfigBase, to_text
from mesh.cost.ahead_of_time import compile_step, memory_per_device
from mesh.cost.roofline import EXPECTED
from mesh.errors import UserError
from mesh.topology import Topology, compiler_version, topology_devices
from tools.aot.candidates import Candidate, candidates
from tools.aot.report import Report, describe_topology, report_dict
from tools.aot.run import described, find_program, tuning_of
from tools.aot.table import at_least

Row = dict[str, Any]


def run_sweep(
    cfg: ConfigBase[Any],
    topology: Topology,
    *,
    limit: int,
    cache: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> Report:
    """Compile the most promising candidates, and rank them; print each result on standard error as it comes.

    Args:
        limit: compilations at most; those that the cache knows do not count.
        cache: JSON lines, one for each candidate tried; a later sweep continues from there.

    Returns:
        JSON-able: `tried`, the best first, `best` (None if none fits), what memory there is, and the estimate's error.

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
        key = _key(cfg, topology, candidate, options)
        row = known.get(key)
        if row is None and compiled >= limit:
            break
        if row is None:
            row = _try(cfg, topology, candidate, available, options)
            compiled += row["compiled"]
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps({"key": key, **row}) + "\n")
        rows.append(row)
        click.echo(f"{compiled}/{limit} {candidate}: {_verdict(row)}", err=True)
    rows.sort(key=lambda row: (not row["fits"], row["estimated_step_s"] or 0.0, row["needed"] or 0))
    return {
        **describe_topology(topology),
        "available": available,
        "error": EXPECTED,
        "versions": {"jax": jax.__version__, "libtpu": compiler_version()},
        "candidates": len(tried),
        "tried": rows,
        "best": rows[0] if rows and rows[0]["fits"] else None,
    }


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
        "set": [f"{path}={value}" for path, value in candidate.edits(tuning_of(cfg)).items()],
        "fits": False,
        "compiled": False,
        "needed": None,
        "arguments": None,
        "estimated_step_s": None,
        "mfu_estimate": None,
        "exposed_s": None,
        "why": None,
    }
    try:
        program = find_program(candidate.applied(cfg), "train", topology_devices(topology))
        least = at_least(program.trace().jaxpr)
        if least > available:
            return {**row, "needed": least, "why": "arguments and what is kept for the backward pass"}
        found = compile_step(program.name, program.trace, program.mesh, topology, options)
    except UserError as error:
        return {**row, "why": str(error)}
    report = report_dict(program, found)
    if not report["fits"]:
        return {**row, "compiled": True, "needed": report["oom"]["needed"], "why": report["oom"]["what"]}
    names = ("estimated_step_s", "mfu_estimate", "exposed_s", "compile_cpu_s")
    memory = {"needed": report["hbm"]["peak"], "arguments": report["hbm"]["arguments"]}
    return {**row, "fits": True, "compiled": True, **memory, **{name: report[name] for name in names}}


def _verdict(row: Row) -> str:
    needed = "" if row["needed"] is None else f"{row['needed'] / (1 << 30):.2f} GiB"
    if row["fits"]:
        return f"fits in {needed}, estimated {row['estimated_step_s']:.4g} s"
    how = "" if row["compiled"] else " (not compiled)"
    return f"does not fit{how}: {needed} {row['why']}"


def print_sweep(result: Report) -> None:
    """Print the ranking, and the best candidate as arguments of the command line."""
    rows = result["tried"]
    table = Table("mesh", "remat", "microbatches", "GiB", "step, s", "MFU", "exposed, s", box=None, pad_edge=False)
    for row in rows:
        gib = "" if row["needed"] is None else f"{row['needed'] / (1 << 30):.2f}"
        times = ("", "", "")
        if row["fits"]:
            times = (f"{row['estimated_step_s']:.4g}", f"{row['mfu_estimate']:.0%}", f"{row['exposed_s']:.4g}")
        memory = gib if row["fits"] else f"{gib} no"
        table.add_row(described(row["mesh"]), row["remat"], str(row["microbatches"]), memory, *times)
    Console().print(table)
    if result["best"]:
        click.echo("best: " + " ".join(f'--set "{one}"' for one in result["best"]["set"]))
    else:
        available = result["available"] / (1 << 30)
        click.echo(f"nothing that was tried fits {available:.2f} GiB; raise --sweep-limit or the topology")


def _key(cfg: ConfigBase[Any], topology: Topology, candidate: Candidate, options: Mapping[str, str] | None) -> str:
    parts = [to_text(candidate.applied(cfg)), str(topology), json.dumps(dict(options or {}), sort_keys=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(cache: Path | None) -> dict[str, Row]:
    if cache is None or not cache.exists():
        return {}
    rows = [json.loads(line) for line in cache.read_text().splitlines() if line.endswith("}")]
    return {row.pop("key"): row for row in rows}
