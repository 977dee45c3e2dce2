"""The model runner: weights, the page pool, and compiled dispatches of few shapes, in one process of an engine.

Every array that goes in has one of a few sizes, so after each has been met once nothing is compiled. Where the mesh
spans processes, all of them make the same calls with the same arrays in the same order (see executor.py).
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.blocks import KEY_BLOCK, key_blocks
from axlearn_like.layers.contexts.cascade import Tile, make_tile, tile_rows
from axlearn_like.layers.contexts.latents import make_latent_pool
from axlearn_like.layers.contexts.paged import make_pool
from axlearn_like.layers.contexts.window import Cell, make_window
from axlearn_like.layers.wrappers.adapters import adapted
from mesh import UserError, make_mesh, to_named_sharding
from mesh.compilation import LateProgram
from mesh.rules import use_rules
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.adapter_bank import AdapterBank, AdapterLimits
from rl.rollout.model_runner.batches import DecodeBatch, PrefillBatch, pack_decode, pack_prefill
from rl.rollout.model_runner.buckets import Buckets
from rl.rollout.model_runner.decode import copy_pages, decode, prefill, zero_pages
from rl.rollout.model_runner.tiles import make_tiles
from rl.rollout.model_runner.verify import decode_drafts
from rl.rollout.model_runner.weights import WeightLayout
from rl.rollout.sampling import Sampler, plain, recorded_support
from rl.rollout.speculation.speculator import Drafts, chunk_of

COPIES = 64  # pages in one copying dispatch


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One compiled program of the runner.

    Attributes:
        kind: prefill, decode, verify (decode with drafts), copy or zero (pages).
        trace: returns the traced program; called with the mesh in force.
        rows: sequences, or pages.
        length: tokens of a sequence.
        plain: False where every sampling parameter is in use.
    """

    kind: str
    trace: Callable[[], Any]
    rows: int
    length: int = 1
    plain: bool = True

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


class ModelRunner:
    """Runs prefill and decoding of batches; knows nothing of sequences and queues."""

    def __init__(
        self, cfg: EngineConfig[Any], described: Items[Any] | None = None, adapters: AdapterLimits | None = None
    ):
        """Make the programs and the memory that they work in.

        Args:
            cfg: the engine's.
            described: devices to compile for that are not there (see aot.py); nothing is allocated on them.
            adapters: room for LoRA adapters, of which every row may use another one; None: there is none.
        """
        if adapters is not None and cfg.weights is not None:
            cfg.require("weights", False, "None where adapters are served: they are added to matrices of floats")
        self._cfg, self._pages, self.page_size = cfg, cfg.pool_pages, cfg.page_size
        self.mesh = make_mesh(cfg.mesh, described)
        platform = self.mesh.devices.flat[0].platform
        self._kernel = platform == "tpu"
        self.params: Params | None = None
        self.traces = 0  # programs compiled
        self._later: LateProgram | None = None  # of plain samplers, see `compilations`
        # By (index of the group or tile, its rows, whether it is a tile); see `_windows_of`.
        self._windows: dict[tuple[int, int, bool], list[Any]] = {}
        with jax.set_mesh(self.mesh):
            self._weights = WeightLayout(cfg.model, self.mesh, stacked=self._kernel, stored=cfg.weights)
            model = self._weights.model
            self._layers, self.vocab, self._dtype = model.num_layers, model.vocab_size, model.dtype
            self._cache_shape: tuple[int, int] = model.cache_shape  # heads and width
            bank = {"mesh": self.mesh, "dtype": self._dtype, "stacked": self._kernel}
            self.bank = None if adapters is None else AdapterBank(adapters, cfg.model, **bank)
            # Adapters differ by row, and are gathered for all rows of a dispatch, not for those of one window.
            expanded = self._kernel or adapters is not None
            self._latent_width: int | None = None if expanded else model.latent_width
            self._window_shape: tuple[int, int] = model.window_shape
            if expanded and self._window_shape != self._cache_shape:
                what = "the kernel for TPUs" if self._kernel else "an engine with adapters"
                raise UserError(
                    f'LatentAttention.decode="absorbed": {what} caches the keys of all heads; expected "expanded"'
                )
            if cfg.speculation is not None and platform == "cpu":
                _check_exact(model, "speculation", "drafts")
            if cfg.cascade is not None:
                self._check_cascade(model, platform)
            limit = model.embedding.max_length
            if limit is not None and cfg.longest > limit:
                raise UserError(
                    f"RolloutEngine: sequences of max_prompt + max_new={cfg.longest} tokens, but the model has learned "
                    f"{limit} positions; expected at most that"
                )
            if self._kernel:
                from axlearn_like.kernels.ragged_paged_attention import check_rules

                for block, _ in model.kinds():
                    check_rules(block.attention.rules, block.attention.sinks_kq is not None)
            if described is None:
                self.pool: Any = self._empty_pool()
            else:
                self.pool = to_named_sharding(jax.eval_shape(self._empty_pool), self.mesh)
                self.params = self._weights.described
        self.buckets = Buckets(
            max_num_seqs=cfg.max_num_seqs,
            steps=cfg.steps_per_dispatch,
            prefill_tokens=cfg.prefill_tokens,
            longest=cfg.longest,
            ragged=self._kernel,
            grouped=platform == "cpu",
        )
        self._compile()

    def _compile(self) -> None:
        graphdef, pages, kernel, steps = self._weights.graphdef, self._pages, self._kernel, self._cfg.steps_per_dispatch
        support = recorded_support(self._cfg.sampler)
        # All devices have all rows: an axis for experts shards those and nothing else.
        rules = {"batch": ()} if self.mesh.shape["expert"] > 1 else None

        def bound(params: Any, batch: PrefillBatch | DecodeBatch) -> Any:
            if batch.adapters is not None:  # rows of the bank are gathered here, once for all steps of a dispatch
                own, bank = params
                params = adapted(own, bank, batch.adapters, stacked=kernel)
            return bind(graphdef, params)

        def run_prefill(params: Any, pool: Any, batch: PrefillBatch) -> Any:
            self.traces += 1
            with use_rules(rules):
                return prefill(bound(params, batch), pool, batch, pages=pages, kernel=kernel)

        def run_decode(
            params: Any, pool: Any, windows: Any, batch: DecodeBatch, quorum: jax.Array, plain: bool, chunk: int = 1
        ) -> Any:
            self.traces += 1
            with use_rules(rules):
                model = bound(params, batch)
                options: dict[str, Any] = {"steps": steps, "pages": pages, "plain": plain, "kernel": kernel}
                if batch.draft is not None:
                    return decode_drafts(model, pool, windows, batch, quorum, chunk=chunk, **options)
                return decode(model, pool, windows, batch, quorum, **options, support=support)

        def run_copy(pool: Any, sources: jax.Array, targets: jax.Array) -> Any:
            self.traces += 1
            return copy_pages(pool, sources, targets, layers=self._layers, pages=pages)

        def run_zero(pool: Any, targets: jax.Array) -> Any:
            self.traces += 1
            return zero_pages(pool, targets, layers=self._layers, pages=pages)

        self._run_prefill = jax.jit(run_prefill, donate_argnums=1)
        self._run_decode = jax.jit(run_decode, donate_argnums=(1, 2), static_argnames=("plain", "chunk"))
        self._run_copy = jax.jit(run_copy, donate_argnums=0)
        self._run_zero = jax.jit(run_zero, donate_argnums=0)

    # ---- weights

    @property
    def weights_like(self) -> Params:
        """Arrays that `place` can use with the least copying."""
        return self._weights.like

    @property
    def approximations(self) -> tuple[str, ...]:
        """Tags of what is drawn with placed weights: of the numbers that hold them."""
        return self._weights.approximations

    def place(self, params: Params) -> Params:
        """Return the trainer's parameters in the engine's layout.

        Raises:
            UserError: an array is missing, or has another shape.
        """
        return self._weights.place(params)

    def install(self, params: Params) -> None:
        """Switch to placed weights, and take the memory of the pages if it was given back."""
        self.wake()
        self.params = params

    def _computed_with(self, params: Any) -> Any:
        """Return the arrays of the model: the parameters, and the bank of adapters if there is one."""
        return params if self.bank is None else (params, self.bank.arrays)

    # ---- memory

    def sleep(self) -> None:
        """Drop weights, pages and windows, so that others can use the memory of the devices."""
        self.params = self.pool = None
        if self.bank is not None:
            self.bank.sleep()
        self._windows.clear()

    def wake(self) -> None:
        """Take the memory of the pages again, which are empty then, and that of the adapters."""
        if self.bank is not None:
            self.bank.wake()
        if self.pool is None:
            with jax.set_mesh(self.mesh):
                self.pool = self._empty_pool()

    # ---- pages

    def _empty_pool(self) -> Any:
        """Return the pages of all layers."""
        (heads, width), page_size = self._cache_shape, self.page_size
        if self._kernel:
            from axlearn_like.kernels.ragged_paged_attention import make_pool as make_kernel_pool

            return make_kernel_pool(self._layers, self._pages, page_size, heads, width, self._dtype)
        sizes: dict[str, Any] = {"layers": self._layers, "pages": self._pages, "page_size": page_size}
        if self._latent_width is not None:
            return make_latent_pool(**sizes, width=self._latent_width, dtype=self._dtype)
        return make_pool(**sizes, kv_heads=heads, head_dim=width, dtype=self._dtype)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages, int32 [n] each; all reads come before the writes."""
        with jax.set_mesh(self.mesh):
            self.pool = self._run_copy(self.pool, sources, targets)

    def zero(self, targets: np.ndarray) -> None:
        """Fill pages with zeros, int32 [n]."""
        with jax.set_mesh(self.mesh):
            self.pool = self._run_zero(self.pool, targets)

    # ---- dispatches

    def prefill(self, batch: PrefillBatch) -> Any:
        """Put the tokens of a batch into the pool; returns their routing if it is recorded (see `decode.prefill`)."""
        with jax.set_mesh(self.mesh):
            self.pool, routing = self._run_prefill(self._computed_with(self.params), self.pool, batch)
        return routing

    def decode(self, batch: DecodeBatch, *, quorum: int, plain: bool, chunk: int = 1) -> dict[str, jax.Array]:
        """Start drawing; returns the arrays of `decode.decode`, or of `verify.decode_drafts` if the batch has drafts.

        Args:
            batch: one of the numbers of rows in `buckets`.
            quorum: rows left with which the dispatch ends.
            plain: the sampling parameters of every row are.
            chunk: tokens that a step feeds each row, with drafts.
        """
        size = len(batch.feed)
        with jax.set_mesh(self.mesh):
            tiled = batch.shared is not None
            windows = self._windows_of(size, tiled=tiled)
            if plain and self._later is not None and batch.draft is None and size == self._later.rows:
                plain = self._later.ready()
            self.pool, windows, out = self._run_decode(
                self._computed_with(self.params), self.pool, windows, batch, np.int32(quorum), plain=plain, chunk=chunk
            )
        for layer, groups in enumerate(windows):
            for key, cells in zip(self._window_keys(size, tiled=tiled), groups, strict=True):
                self._windows[key][layer] = cells
        return out

    @property
    def pages_of_a_row(self) -> int:
        """Entries of a row of the page table, so that the longest sequence fits."""
        return self.buckets.widest // self.page_size

    @property
    def block_ends(self) -> list[int]:
        """The end of each block of keys of the longest sequences."""
        if self._kernel:
            return list(range(KEY_BLOCK, self.buckets.widest + 1, KEY_BLOCK))
        return [block.stop for block in key_blocks(self.buckets.widest, self._window_shape[1])]

    def _windows_of(self, rows: int, *, tiled: bool = False) -> list[list[Any]]:
        """Return windows to decode in, by layer and group of rows. Kept: allocation takes a tenth of a dispatch."""
        if self._kernel:
            return []
        keys = self._window_keys(rows, tiled=tiled)
        for key in keys:
            if key not in self._windows:
                self._windows[key] = [self._make_window(*key[1:]) for _ in range(self._layers)]
        return [[self._windows[key][layer] for key in keys] for layer in range(self._layers)]

    def _window_keys(self, rows: int, *, tiled: bool) -> list[tuple[int, int, bool]]:
        sizes = tile_rows(rows, min(rows, self._cfg.cascade or rows)) if tiled else self.buckets.groups(rows)
        return [(index, size, tiled) for index, size in enumerate(sizes)]

    def _make_window(self, rows: int, tiled: bool) -> Tile | tuple[Cell, ...]:
        heads, width = self._window_shape
        make = make_tile if tiled else make_window
        return make(rows, self.buckets.widest, kv_heads=heads, head_dim=width, dtype=self._dtype)

    def _empty_batch(self, samplers: Items[Sampler.Config]) -> DecodeBatch:
        """Return a batch without sequences, of as many rows."""
        cfg, tiles = self._cfg, None
        if cfg.cascade is not None:
            tiles = make_tiles([], len(samplers), cfg.cascade, self.block_ends, self.page_size)
        sizes: dict[str, Any] = {"pages": self.pages_of_a_row, "vocab": self.vocab}
        return pack_decode([], samplers, **sizes, adapters=self.bank is not None, tiles=tiles)

    def _check_cascade(self, model: Any, platform: str) -> None:
        """Refuse shared keys where they cannot be read once, or would change a bit."""
        if self._kernel and any(block.attention.rules.window for block, _ in model.kinds()):
            self._cfg.require("cascade", False, "None on TPUs for a policy with a sliding window")
        if self._latent_width is not None:
            self._cfg.require("cascade", False, "None for a policy with latent attention")
        if platform == "cpu":
            _check_exact(model, "cascade", "shared keys")

    # ---- ahead of time

    def compilations(self) -> list[Callable[[], None]]:
        """Return functions that each compile a program of a short request by itself, before there are weights.

        They may run in threads at the same time, until the runner is used, which then finds the programs compiled.
        Decoding is compiled for samplers of every kind. A program for those with a temperature alone, which is faster
        and has the same results to the bit, is compiled in a thread when the first of them comes. (Not to be called in
        an engine of several processes, which run the same programs.)
        """
        chunk, rows = self.buckets.chunks[0], self.buckets.rows(1)
        width = self.buckets.width(chunk) // self.page_size
        with_bank, weights = self.bank is not None, self._computed_with(self._weights.described)
        prompt = pack_prefill([], self.buckets.prefill_rows(1, chunk), chunk, width, adapters=with_bank)
        batch = self._empty_batch([Sampler.Config()] * rows)
        with jax.set_mesh(self.mesh):
            pool, windows = _described((self.pool, self._windows_of(rows, tiled=batch.shared is not None)))
        drafts = [partial(self._compile_drafts, one) for one in self._draft_rows()]

        def compile_prefill() -> None:
            with jax.set_mesh(self.mesh):
                self._run_prefill.lower(weights, pool, prompt).compile()

        def compile_decode(plain: bool) -> None:
            with jax.set_mesh(self.mesh):
                # All static arguments as `decode` passes them: a default that is left out makes another program.
                self._run_decode.lower(weights, pool, windows, batch, np.int32(1), plain=plain, chunk=1).compile()

        self._later = LateProgram(rows, partial(compile_decode, True))
        return [partial(compile_decode, False), compile_prefill, *drafts]

    def _draft_rows(self) -> list[int]:
        """Return the rows of all dispatches with drafts, the fewest last."""
        cfg = self._cfg.speculation
        return [] if cfg is None else [rows for rows in self.buckets.few_rows if chunk_of(cfg, rows) > 1]

    def _trace_drafts(self, params: Any, rows: int) -> Any:
        """Return the traced program of a dispatch with drafts, for samplers with a temperature alone."""
        cfg = self._cfg.speculation
        assert cfg is not None
        chunk = chunk_of(cfg, rows)
        drafts = Drafts(np.zeros((rows, cfg.text), np.int32), np.zeros(rows, np.int32), chunk)
        sizes: dict[str, Any] = {"pages": self.pages_of_a_row, "vocab": self.vocab, "adapters": self.bank is not None}
        batch = pack_decode([], [Sampler.Config()] * rows, **sizes, drafts=drafts)
        windows = self._windows_of(rows)
        return self._run_decode.trace(params, self.pool, windows, batch, np.int32(1), plain=True, chunk=chunk)

    def _compile_drafts(self, rows: int) -> None:
        with jax.set_mesh(self.mesh):
            self._trace_drafts(self._computed_with(self._weights.described), rows).lower().compile()

    def dispatches(self) -> list[Dispatch]:
        """Return the dispatches that the engine runs, of each kind the largest."""
        rows = self._cfg.max_num_seqs
        every_rule = Sampler.Config(top_p=0.9, repetition_penalty=1.1, logit_bias=((0, 1.0),))

        def trace_prefill(rows: int, chunk: int) -> Any:
            return self._run_prefill.trace(self.params, self.pool, pack_prefill([], rows, chunk, self.pages_of_a_row))

        def trace_decode(sampler: Sampler.Config) -> Any:
            batch = self._empty_batch([sampler] * rows)
            windows = self._windows_of(rows, tiled=batch.shared is not None)
            return self._run_decode.trace(self.params, self.pool, windows, batch, np.int32(1), plain=plain(sampler))

        pages = np.zeros(COPIES, np.int32)
        shapes = [self.buckets.prefill(chunk) for chunk in self.buckets.chunks]
        return [
            *(Dispatch("prefill", partial(trace_prefill, rows, chunk), rows, chunk) for rows, chunk in shapes),
            Dispatch("decode", partial(trace_decode, Sampler.Config()), rows),
            Dispatch("decode", partial(trace_decode, every_rule), rows, plain=False),
            *(Dispatch("verify", partial(self._trace_drafts, self.params, one), one) for one in self._draft_rows()[:1]),
            Dispatch("copy", partial(self._run_copy.trace, self.pool, pages, pages), len(pages)),
            Dispatch("zero", partial(self._run_zero.trace, self.pool, pages), len(pages)),
        ]


def _described(arrays: Any) -> Any:
    """Return arrays as they are described to the compiler: their memory may go to others while it compiles."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def _check_exact(model: Any, field: str, what_it_does: str) -> None:
    """Refuse a field on a CPU for layers whose sums of a few tokens differ there from those of one, in the last bit.

    Raises:
        UserError: the policy has latent attention, or caps scores or logits.
    """
    caps = [model.embedding, *(block.attention.rules for block, _ in model.kinds())]
    capped = any(getattr(one, "soft_cap", None) or getattr(one, "logit_soft_cap", None) for one in caps)
    if capped or model.latent_width is not None:
        what = "capped scores or logits" if capped else "latent attention"
        raise UserError(
            f"RolloutEngine.{field}: on a CPU {what_it_does} may change the last bit of a log-probability of a policy "
            f"with {what}; expected None"
        )
