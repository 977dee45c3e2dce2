"""`axl bench block_sizes`: which block sizes of paged attention are fastest on the TPU of this machine.

On a TPU every candidate first passes the engine's self-test, then all take turns; the fastest of each phase is written
into a table. Without one nothing is timed and nothing is written: candidates that the compiler refuses are dropped, and
the others are listed by the instructions that their code has for each key, which is no order of speed.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from axlearn_like.kernels.paged_attention.rows import PagedRows
from mesh.errors import UserError
from mesh.topology import compiler_version, parse_topology
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import our_command, run_command
from tools.bench.kernels.candidates import PHASES, TILE, Job, Sizes, candidates, program
from tools.bench.kernels.llo import dump_flags

NO_TIMES = (
    "not timed: the TPU is described, not here. Instructions and spills are those of the compiled code; loops over "
    "keys depend on the data, and waiting for memory is not seen, so this is no order of speed, and no table is written"
)
QUICK = Job(kv_heads=1, per_kv=2, rows=2, keys=64, chunk=32, interpret=True)
CALLS = 8  # of a kernel in one timed program: a dispatch costs a tenth of a millisecond


def check(topology: str, table: Path | None, *, quick: bool) -> None:
    """Refuse what can have no times here (UserError)."""
    if table is not None and (topology or quick):
        raise UserError("--table: a table has times of a TPU of this machine; expected no --topology and no --quick")
    if topology or quick:
        return
    import jax

    if jax.default_backend() != "tpu":
        raise UserError(
            f"axl bench block_sizes: this machine has no TPU ({jax.devices()[0].device_kind}); --topology v6e:2x2 "
            "shows what the compiler says of the candidates, without times"
        )


def compiled(topology: str, job: Job, say: Say) -> dict[str, Any]:
    """Return what the compiler says of the candidates for a TPU that is not here, by phase, least code per key first.

    Raises:
        UserError: there is no such topology, or no compiler.
    """
    parse_topology(topology)
    if compiler_version() is None:
        raise UserError("axl bench block_sizes: there is no TPU here, and the TPU compiler (libtpu) is not installed")
    say(f"{topology}: ahead of time; nothing is timed")
    with TemporaryDirectory() as folder:
        arguments = topology, folder, json.dumps(dataclasses.asdict(job))
        phases = run_command(our_command("tools.bench.kernels.candidates", *arguments), **dump_flags(Path(folder)))
    for rows in phases.values():
        for row in rows:
            if "refused" not in row:
                row["bundles_per_key"] = round(row["bundles"] / _covered(row), 3)
        rows.sort(key=lambda row: row.get("bundles_per_key", float("inf")))
    return {**_about(job), "device": topology, "timed": False, "note": NO_TIMES, "phases": phases}


def _covered(sizes: Sizes) -> int:
    """Return the keys of a block, times its queries where those are a chunk's: what one pass of the code covers."""
    keys = next(sizes[name] for name in ("row_keys", "chunk_keys", "shared_keys") if name in sizes)
    return keys * sizes.get("chunk_queries", 1)


def timed(job: Job, rounds: int, say: Say, table: Path | None = None) -> dict[str, Any]:
    """Return the seconds of the candidates on the device of this process, by phase, fastest first.

    Args:
        job: what they do.
        rounds: turns of each.
        say: shows progress.
        table: a file that gets the best of each phase, as the entry of this device and shape.
    """
    import jax

    device = jax.devices()[0]
    phases = {phase: _time_phase(job, phase, device, rounds, say) for phase in PHASES}
    best: dict[str, int] = {}
    for phase, rows in phases.items():
        if "seconds" in rows[0]:
            best |= {name: rows[0][name] for name in PHASES[phase]}
    result = {**_about(job), "device": device.device_kind, "timed": True, "best": best, "phases": phases}
    if table is not None:
        result["table"] = _write(table, job, device, best, phases)
    return result


def _about(job: Job) -> dict[str, Any]:
    about = {"bench": "block_sizes", "job": dataclasses.asdict(job), "libtpu": compiler_version()}
    return {**about, "machine": machine(), **circumstances()}


def _time_phase(job: Job, phase: str, device: Any, rounds: int, say: Say) -> list[dict[str, Any]]:
    """Return the candidates with the median seconds of a call, fastest first; those that are refused last."""
    runs: list[tuple[dict[str, Any], Callable[[], float]]] = []
    rows: list[dict[str, Any]] = []
    for sizes in candidates(phase, job.keys):
        row: dict[str, Any] = dict(sizes)
        rows.append(row)
        try:
            runs.append((row, _timer(job, phase, device, sizes)))
        except UserError as error:
            row["refused"] = str(error)
        say(f"{phase} {sizes}: {row.get('refused', 'agrees with XLA')}")
    taken: dict[int, list[float]] = {index: [] for index in range(len(runs))}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}, {phase}")
        for index, (_, run) in enumerate(runs):
            taken[index].append(run())
    for index, (row, _) in enumerate(runs):
        row["seconds"] = statistics.median(taken[index])
    return sorted(rows, key=lambda row: row.get("seconds", float("inf")))


def _timer(job: Job, phase: str, device: Any, sizes: Sizes) -> Callable[[], float]:
    """Return a function that times a call of a kernel which has passed the self-test, and is compiled.

    Raises:
        KernelDisagrees: it computes something else than XLA, or does not compile.
    """
    import jax
    import jax.numpy as jnp

    from axlearn_like.kernels.attention.interface import ScoreRules
    from axlearn_like.kernels.paged_attention.self_test import KernelShapes, run_self_test

    kernel = job.kernel(device, sizes)
    heads = job.kv_heads, job.per_kv, job.head_dim
    longest = -(-job.keys // job.page_size) * job.page_size
    shapes = KernelShapes(heads, job.page_size, jnp.bfloat16, longest, job.chunk, TILE if phase == "shared" else None)
    run_self_test(kernel, shapes, [ScoreRules()])
    attend, described = program(job, phase, kernel)

    def calls(rows: Any, pool: Any, *shared: Any) -> Any:
        def call(_: Any, state: Any) -> Any:
            q, pool = state
            return attend(rows._replace(q_rckqh=q), pool, *shared)  # of the last one's result, so that none is left out

        return jax.lax.fori_loop(0, CALLS, call, (rows.q_rckqh, pool))

    run = jax.jit(calls, donate_argnums=1)
    arrays = _arrays(job, *described)

    def once() -> float:
        began = time.perf_counter()
        _, arrays[1] = jax.block_until_ready(run(*arrays))
        return (time.perf_counter() - began) / CALLS

    once()
    return once


def _arrays(job: Job, rows: PagedRows, pool: Any, *tiles: Any) -> list[Any]:
    """Return arguments of a program: random numbers, rows of full length, the first half of a tile's keys in common."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, pool = (jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, (*rows[:3], pool), strict=True))
    (count, pages), chunk = rows.page_table_rw.shape, rows.k_rckh.shape[1]
    table = 1 + jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages)
    starts, counts = (jnp.full(count, size, jnp.int32) for size in (job.keys - chunk, chunk))
    made: list[Any] = [PagedRows(q, k, v, table, starts, counts), pool]
    if tiles:
        shared = job.keys // 2 // job.page_size * job.page_size
        made += [jnp.full(tiles[0].shape, shared, jnp.int32), TILE * jnp.arange(tiles[0].size, dtype=jnp.int32)]
    return made


def _write(path: Path, job: Job, device: Any, best: Sizes, phases: dict[str, Any]) -> str:
    """Write the best sizes into a table, which is made or gets one more entry; returns its path."""
    from axlearn_like.kernels.paged_attention.block_sizes import BlockTable, load_table

    kernel = job.kernel(device, best)
    table = load_table(path) if path.exists() else BlockTable()
    seconds = {
        phase: {"best": rows[0]["seconds"], "default": next(row.get("seconds") for row in rows if _is_default(row))}
        for phase, rows in phases.items()
        if "seconds" in rows[0]
    }
    about = circumstances()
    measured = {"device": device.device_kind, "jax": about["versions"]["jax"], "libtpu": compiler_version()}
    measured |= {"date": about["date"], "job": dataclasses.asdict(job), "seconds": seconds}
    table.with_entry(kernel.key, kernel.sizes, measured).write(path)
    return str(path)


def _is_default(row: dict[str, Any]) -> bool:
    from axlearn_like.kernels.paged_attention.block_sizes import BlockSizes

    default = dataclasses.asdict(BlockSizes())
    return all(row[name] == default[name] for name in row if name in default)
