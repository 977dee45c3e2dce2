"""`axl bench block_sizes`: which block sizes of paged attention are fastest on the TPU of this machine.

Every candidate first passes the engine's self-test, then all take turns.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from axlearn_like.kernels.paged_attention.rows import PagedRows
from mesh.errors import UserError
from mesh.topology import compiler_version
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.kernels.candidates import PHASES, TILE, Job, Sizes, candidates, program

QUICK = Job(kv_heads=1, per_kv=2, rows=2, keys=64, chunk=32, interpret=True)
CALLS = 8  # calls of a kernel in one timed program: a dispatch costs a tenth of a millisecond


def check(*, quick: bool) -> None:
    """Refuse what can have no times here (UserError)."""
    import jax

    if not quick and jax.default_backend() != "tpu":
        raise UserError(
            f"axl bench block_sizes: this machine has no TPU ({jax.devices()[0].device_kind}); run it where the engine "
            "is to run, or with --quick in simulation"
        )


def timed(job: Job, rounds: int, say: Say) -> dict[str, Any]:
    """Return the seconds of the candidates on the device of this process, by phase, fastest first.

    Args:
        job: what they do.
        rounds: turns of each.
        say: shows progress.
    """
    import jax

    device = jax.devices()[0]
    phases = {phase: _time_phase(job, phase, rounds, say) for phase in PHASES}
    best: dict[str, int] = {}
    for phase, rows in phases.items():
        if "seconds" in rows[0]:
            best |= {name: rows[0][name] for name in PHASES[phase]}
    return {**_about(job), "device": device.device_kind, "best": best, "phases": phases}


def _about(job: Job) -> dict[str, Any]:
    about = {"bench": "block_sizes", "job": dataclasses.asdict(job), "libtpu": compiler_version()}
    return {**about, "machine": machine(), **circumstances()}


def _time_phase(job: Job, phase: str, rounds: int, say: Say) -> list[dict[str, Any]]:
    """Return the candidates with the median seconds of a call, fastest first; those that are refused last."""
    runs: list[tuple[dict[str, Any], Callable[[], float]]] = []
    rows: list[dict[str, Any]] = []
    for sizes in candidates(phase, job.keys):
        row: dict[str, Any] = dict(sizes)
        rows.append(row)
        try:
            runs.append((row, _timer(job, phase, sizes)))
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


def _timer(job: Job, phase: str, sizes: Sizes) -> Callable[[], float]:
    """Return a function that times a call of a kernel which has passed the self-test, and is compiled.

    Raises:
        KernelDisagrees: it computes something else than XLA, or does not compile.
    """
    import jax
    import jax.numpy as jnp

    from axlearn_like.kernels.attention.interface import ScoreRules
    from axlearn_like.kernels.paged_attention.self_test import KernelShapes, run_self_test

    kernel = job.kernel(sizes)
    heads = job.kv_heads, job.per_kv, job.head_dim
    longest = -(-job.keys // job.page_size) * job.page_size
    shapes = KernelShapes(heads, job.page_size, jnp.bfloat16, longest, job.chunk, TILE if phase == "shared" else None)
    run_self_test(kernel, shapes, [ScoreRules()])
    attend, described = program(job, phase, kernel)

    def calls(rows: Any, pool: Any, *shared: Any) -> Any:
        def call(_: Any, state: Any) -> Any:
            q, pool = state
            return attend(rows._replace(q_rckqh=q), pool, *shared)  # reads the last result, so that no call is left out

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
