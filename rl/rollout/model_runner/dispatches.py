"""The programs of an engine ahead of time: the largest of each kind, those of a run, and those of a server."""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axlearn_like.layers.contexts.paged import NULL_PAGE
from mesh import UserError
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.batches import DecodeBatch, PrefillBatch, pack_decode, pack_prefill
from rl.rollout.model_runner.runner import COPIES, LEAST_COPIES, ModelRunner
from rl.rollout.model_runner.shapes.buckets import halvings
from rl.rollout.model_runner.shapes.listed import Rules, Shape
from rl.rollout.model_runner.tiles import make_tiles
from rl.rollout.sampling import Sampler, plain
from rl.rollout.speculation.speculator import Drafts, chunk_of


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One compiled program of a model runner."""

    kind: str  # prefill, decode, verify (decode with drafts), copy or zero (pages)
    trace: Callable[[], Any]  # returns the traced program; called with the mesh in force
    rows: int  # sequences, or pages
    length: int = 1  # tokens of a sequence
    plain: bool = True  # False where every sampling parameter is in use

    @property
    def name(self) -> str:
        """The kind and its sizes, for people."""
        if self.kind == "prefill":
            return f"prefill {self.rows} x {self.length}"
        if self.kind == "decode":
            return f"decode {self.rows}, {'plain' if self.plain else 'all rules'}"
        if self.kind == "verify":
            return f"decode {self.rows}, with drafts"
        return f"{self.kind} pages"


def largest_dispatches(runner: ModelRunner) -> list[Dispatch]:
    """Return the dispatches that an engine runs, of each kind the largest."""
    rows, steps, pool = runner.buckets.rows(runner.cfg.max_num_seqs), runner.steps, runner.cache.pool
    every_rule = Sampler.Config(top_p=0.9, repetition_penalty=1.1, logit_bias=((0, 1.0),))

    def trace_prefill(rows: int, chunk: int) -> Any:
        return steps.prefill.trace(runner.params, pool, pack_prefill([], rows, chunk, runner.pages_of_a_row))

    def trace_decode(sampler: Sampler.Config) -> Any:
        batch = _empty_batch(runner, [sampler] * rows)
        windows = runner.cache.windows(rows, tiled=batch.shared is not None)
        return steps.decode.trace(runner.params, pool, windows, batch, np.int32(1), plain=plain(sampler))

    shapes = [runner.buckets.prefill(chunk) for chunk in runner.buckets.chunks]
    drafted = _draft_rows(runner)[:1]
    return [
        *(Dispatch("prefill", partial(trace_prefill, rows, chunk), rows, chunk) for rows, chunk in shapes),
        Dispatch("decode", partial(trace_decode, Sampler.Config()), rows),
        Dispatch("decode", partial(trace_decode, every_rule), rows, plain=False),
        *(Dispatch("verify", partial(_trace_drafts, runner, one), one) for one in drafted),
        *_page_dispatches(runner, [COPIES]),
    ]


def compilations(runner: ModelRunner, listed: Items[Shape]) -> list[Callable[[], None]]:
    """Return functions that each compile one of the listed programs by itself, before there are weights.

    They may run in threads, beside each other and beside the use of the runner, which then finds the programs compiled.
    Memory that the programs work in is taken here. (Not to be called in an engine of several processes, which run the
    same programs.)
    """
    params = runner.described_params
    with jax.set_mesh(runner.mesh):
        pool = _described(runner.cache.pool)

    def described(shape: Shape) -> Callable[[], Any]:
        """Return a function that traces the program."""
        batch = _listed_batch(runner, shape)
        if isinstance(batch, PrefillBatch):
            return partial(runner.steps.prefill.trace, params, pool, batch)
        with jax.set_mesh(runner.mesh):
            windows = _described(runner.cache.windows(shape.rows, tiled=batch.shared is not None))
        # All static arguments as `ModelRunner.decode` passes them: one that is left out makes another program.
        static = {"plain": shape.rules is Rules.PLAIN, "chunk": shape.tokens}
        return partial(runner.steps.decode.trace, params, pool, windows, batch, np.int32(1), **static)

    def compile_one(trace: Callable[[], Any]) -> None:
        with jax.set_mesh(runner.mesh):
            trace().lower().compile()

    return [partial(compile_one, described(shape)) for shape in listed]


def run_idle(runner: ModelRunner, shapes: Items[Shape]) -> None:
    """Call compiled programs without sequences: no request pays what a first call costs.

    Those are all of decoding, in which one row draws a token over the null page, and the smallest prefill.
    """
    prefills = [one for one in shapes if one.kind == "prefill"]
    smallest = min(prefills, key=lambda one: (one.rows * one.tokens, one.keys))
    for shape in [smallest, *(one for one in shapes if one.kind in ("decode", "verify"))]:
        batch = _listed_batch(runner, shape)
        if isinstance(batch, PrefillBatch):
            jax.block_until_ready(runner.prefill(batch))
        else:
            batch.remaining[0] = 1  # one step, or nothing of the loop would run
            options: dict[str, Any] = {"plain": shape.rules is Rules.PLAIN, "chunk": shape.tokens}
            jax.device_get(runner.decode(batch, min_alive_rows=1, **options))
    runner.zero(np.full(COPIES, NULL_PAGE, np.int32))


def compile_page_programs(runner: ModelRunner) -> None:
    """Compile copying and clearing of pages, and loading of adapters, by doing it where it changes nothing."""
    for count in halvings(COPIES, LEAST_COPIES):
        nothing = np.full(count, NULL_PAGE, np.int32)
        runner.copy(nothing, nothing)
        if runner.cfg.tiers is not None:
            runner.write(nothing, jax.device_get(runner.read(nothing)))
    runner.zero(np.full(COPIES, NULL_PAGE, np.int32))
    if runner.bank is not None:
        runner.bank.compile_put()


def _page_dispatches(runner: ModelRunner, copies: Items[int]) -> list[Dispatch]:
    """Return copying of so many pages at a time, and clearing."""
    steps, pool = runner.steps, runner.cache.pool

    def trace_copy(count: int) -> Any:
        return steps.copy.trace(pool, np.zeros(count, np.int32), np.zeros(count, np.int32))

    zero = partial(steps.zero.trace, pool, np.zeros(COPIES, np.int32))
    return [*(Dispatch("copy", partial(trace_copy, n), n) for n in copies), Dispatch("zero", zero, COPIES)]


def _empty_batch(
    runner: ModelRunner, samplers: Items[Sampler.Config], drafts: Drafts | None = None, **tables: Any
) -> DecodeBatch:
    """Return a batch without sequences, of as many rows; `tables`: those of `DecodeLayout`."""
    cascade, tiles = runner.cfg.cascade, None
    if cascade is not None and drafts is None:
        tiles = make_tiles([], len(samplers), cascade, runner.cache.block_ends, runner.page_size)
    return pack_decode([], samplers, runner.decode_layout(**tables), drafts=drafts, tiles=tiles)


def _listed_batch(runner: ModelRunner, shape: Shape) -> PrefillBatch | DecodeBatch:
    """Return a batch of a listed program, without sequences."""
    if shape.kind in ("prefill", "score"):
        pages, adapters = shape.keys // runner.page_size, runner.bank is not None
        scored = shape.kind == "score"
        return pack_prefill([], shape.rows, shape.tokens, pages, adapters=adapters, scored=scored)
    tables: dict[str, Any] = {"tables": shape.rules is Rules.TABLES, "stops": runner.listed_stops}
    drafts = _empty_drafts(runner, shape.rows) if shape.kind == "verify" else None
    return _empty_batch(runner, [Sampler.Config()] * shape.rows, drafts, **tables)


def _empty_drafts(runner: ModelRunner, rows: int) -> Drafts:
    cfg = runner.cfg.speculation
    assert cfg is not None
    return Drafts(np.zeros((rows, cfg.text), np.int32), np.zeros(rows, np.int32), chunk_of(cfg, rows))


def _draft_rows(runner: ModelRunner) -> list[int]:
    """Return the rows of all dispatches with drafts, the most first."""
    cfg = runner.cfg.speculation
    return [] if cfg is None else [rows for rows in runner.buckets.few_rows if chunk_of(cfg, rows) > 1]


def _trace_drafts(runner: ModelRunner, rows: int) -> Any:
    """Return the traced program of a dispatch with drafts, for samplers with a temperature alone."""
    drafts = _empty_drafts(runner, rows)
    batch = _empty_batch(runner, [Sampler.Config()] * rows, drafts)
    arrays = runner.params, runner.cache.pool, runner.cache.windows(rows), batch, np.int32(1)
    return runner.steps.decode.trace(*arrays, plain=True, chunk=drafts.chunk)


def _described(arrays: Any) -> Any:
    """Return arrays as they are described to the compiler: their memory may go to others while it compiles."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def engine_dispatches(cfg: EngineConfig[Any], devices: Items[Any]) -> tuple[Mesh, list[Dispatch]]:
    """Return the engine's mesh, and the dispatches that it runs, of each kind the largest."""
    runner = described_runner(cfg, devices)
    return runner.mesh, largest_dispatches(runner)


def described_runner(cfg: EngineConfig[Any], devices: Items[Any]) -> ModelRunner:
    """Return a runner on described devices; an empty mesh means tensor parallelism over all of them."""
    wanted = math.prod(cfg.mesh.values())
    if cfg.mesh and -1 not in cfg.mesh.values() and wanted != len(devices):
        text = " x ".join(f"{name} {size}" for name, size in cfg.mesh.items())
        raise UserError(
            f"RolloutEngine.mesh {text} needs {wanted} devices but there are {len(devices)}: an engine has all devices "
            f"of a topology to itself; compile it for one of {wanted}, as each rollout worker has them"
        )
    cfg = cfg.clone(mesh=cfg.mesh or {"tensor": len(devices)})
    cfg.check()
    return ModelRunner(cfg, devices)
