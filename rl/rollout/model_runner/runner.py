"""The model runner: weights, the page pool, and compiled dispatches of few shapes, in one process of an engine.

Every array that goes in has one of a few sizes, so after each has been met once nothing is compiled. Where the mesh
spans processes, all of them make the same calls with the same arrays in the same order (see executor.py).
"""

from collections.abc import Sequence as Items
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.contexts.latents import expands_latents
from mesh import make_mesh
from rl.rollout.config import EngineConfig
from rl.rollout.kv_cache.kvcomm.arrays import frequencies
from rl.rollout.model_runner.adapter_bank import AdapterBank, AdapterLimits
from rl.rollout.model_runner.batches import DecodeBatch, DecodeLayout, PrefillBatch, stop_columns
from rl.rollout.model_runner.cache_arrays import CacheArrays
from rl.rollout.model_runner.jitted_steps import jitted_steps
from rl.rollout.model_runner.shapes.buckets import Buckets
from rl.rollout.model_runner.shapes.listed import STOPS
from rl.rollout.model_runner.weights import WeightLayout
from rl.rollout.sampling import recorded_candidates
from rl.rollout.validation import check_policy, why_inexact

COPIES, LEAST_COPIES = 64, 4  # pages in one copying dispatch


class ModelRunner:
    """Runs prefill and decoding of batches; knows nothing of sequences and queues.

    Attributes:
        params: weights in place; None: there are none yet, or the engine sleeps.
        bank: bank of LoRA adapters, if they are served.
        expert_slots: replicas of experts; None: there are none.
        kernel: kernel of attention, on TPUs; None: XLA.
        key_angles: angles by which a position rotates keys (`kvcomm.arrays.frequencies`).
        redraws: a chunk of tokens over drafts has the sums of single ones, or as near as the platform has them.
        kernel_choice: block sizes of the kernel and what its self-test has found, as fields of an event.
    """

    def __init__(
        self, cfg: EngineConfig[Any], described: Items[Any] | None = None, adapters: AdapterLimits | None = None
    ):
        """Make programs and memory; `described`: devices to compile for alone; `adapters`: room for LoRA, or None."""
        self.cfg, self.page_size = cfg, cfg.page_size
        self.mesh = make_mesh(cfg.mesh, described)
        platform = self.mesh.devices.flat[0].platform
        kernel = platform == "tpu" or cfg.kernel.interpret
        self.params: Params | None = None
        self.kernel_choice: dict[str, Any] = {}
        with jax.set_mesh(self.mesh):
            form: dict[str, Any] = {"stacked": kernel, "stored": cfg.weights, "replicas": cfg.replicas}
            form["longest"] = cfg.longest
            self._weights = WeightLayout(cfg.model, self.mesh, **form)
            model, self.expert_slots = self._weights.held, self._weights.slots
            check_policy(cfg, model, platform, adapters=adapters is not None)
            recorded = recorded_candidates(cfg.sampler) is not None
            self.redraws = not recorded and (platform != "cpu" or why_inexact(model) is None)
            self.vocab: int = model.vocab_size
            self.key_angles = frequencies(model)
            bank = {"mesh": self.mesh, "dtype": model.dtype, "stacked": kernel}
            self.bank = None if adapters is None else AdapterBank(adapters, cfg.model, **bank)
            self.buckets = Buckets(
                max_num_seqs=max(cfg.max_num_seqs, _least_rows(model.dtype, platform)),
                steps=cfg.steps_per_dispatch,
                prefill_tokens=cfg.prefill_tokens,
                longest=cfg.longest,
                ragged=kernel,
                grouped=platform == "cpu",
            )
            self.kernel = self.cfg.kernel.build() if kernel else None
            if described is None:
                self.kernel_choice = self._test_kernel(model)
            expanded = kernel or adapters is not None
            expands = not expanded and expands_latents(model)
            in_pages = cfg.decodes_from(platform, expands=expands) == "pages"
            form = {"kernel": kernel, "in_pages": in_pages, "expanded": expanded}
            self.cache = CacheArrays(cfg, model, self.buckets, **form)
            if described is None:
                self.cache.take()
            else:
                self.cache.describe(self.mesh)
                self.params = self._weights.described
        kind: dict[str, Any] = {"kernel": self.kernel, "in_pages": in_pages, "adapters": adapters is not None}
        self.steps = jitted_steps(cfg, self._weights.graphdef, self.cache.layers, self.mesh, **kind)

    def _test_kernel(self, model: Any) -> dict[str, Any]:
        """Return the kernel's sizes and its self-test's figures, for an event; {}: there is none (KernelDisagrees)."""
        if self.kernel is None:
            return {}
        described = self.kernel.described()
        if not self.cfg.kernel.self_test:
            return described
        from axlearn_like.kernels.paged_attention.self_test import KernelShapes, run_self_test

        attentions = [block.attention for block, _ in model.kinds()]
        shapes = KernelShapes(
            heads=attentions[0].query_shape,
            page_size=self.page_size,
            dtype=model.dtype,
            longest=self.buckets.widest,
            chunk=max(self.buckets.chunks),
            tile=self.cfg.cascade,
            int8=self.cfg.kv_cache_dtype == "int8",
        )
        if hasattr(attentions[0], "cache_ranks"):
            from axlearn_like.kernels.low_rank.self_test import run_rank_self_test

            kinds = [(one.rules, one.window_keys.steps) for one in attentions]
            return described | run_rank_self_test(self.kernel, shapes, attentions[0].cache_ranks, kinds)
        return described | run_self_test(self.kernel, shapes, [one.rules for one in attentions])

    @property
    def weights_like(self) -> Params:
        """Arrays that `place` can use with the least copying."""
        return self._weights.like

    @property
    def described_params(self) -> Any:
        """Shapes, types and shardings of the arrays that the steps compute with."""
        return self._with_adapters(self._weights.described)

    @property
    def approximations(self) -> tuple[str, ...]:
        """Tags of what is drawn with placed weights: of the numbers that hold them, and those of the cache."""
        return self.cfg.tags

    def place(self, params: Params) -> Params:
        """Return the trainer's parameters in the engine's layout (UserError: one is missing, or of another shape)."""
        return self._weights.place(params)

    def install(self, params: Params) -> None:
        """Switch to placed weights, and take the memory of the pages if it was given back."""
        self.wake()
        self.params = params
        if self.expert_slots is not None:
            self.expert_slots.installed(params)

    def _with_adapters(self, params: Any) -> Any:
        return params if self.bank is None else (params, self.bank.arrays)

    def sleep(self) -> None:
        """Drop weights, pages and windows, so that others can use the memory of the devices."""
        self.params = None
        if self.bank is not None:
            self.bank.sleep()
        self.cache.drop()

    def wake(self) -> None:
        """Take the memory of the pages again, which are empty then, and that of the adapters."""
        if self.bank is not None:
            self.bank.wake()
        with jax.set_mesh(self.mesh):
            self.cache.take()

    def clear(self) -> None:
        """Replace pages and windows by empty ones."""
        self.cache.drop()
        with jax.set_mesh(self.mesh):
            self.cache.take()

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages, int32 [n] each; all reads come before the writes."""
        with jax.set_mesh(self.mesh):
            self.cache.pool = self.steps.copy(self.cache.pool, sources, targets)

    def zero(self, targets: np.ndarray) -> None:
        """Fill pages with zeros, int32 [n]."""
        with jax.set_mesh(self.mesh):
            self.cache.pool = self.steps.zero(self.cache.pool, targets)

    def read(self, sources: np.ndarray) -> list[jax.Array]:
        """Return copies of pages, int32 [n], under way: of each array of the pool [n, layers, ...]."""
        with jax.set_mesh(self.mesh):
            return self.steps.read(self.cache.pool, sources)

    def write(self, targets: np.ndarray, contents: Items[np.ndarray]) -> None:
        """Write pages, int32 [n], as `read` returns them."""
        with jax.set_mesh(self.mesh):
            self.cache.pool = self.steps.write(self.cache.pool, targets, list(contents))

    @property
    def pages_of_a_row(self) -> int:
        """Entries of a row of the page table, so that the longest sequence fits."""
        return self.buckets.widest // self.page_size

    @property
    def listed_stops(self) -> int:
        """Columns of stop tokens in the programs that are compiled ahead."""
        return stop_columns(len(self.cfg.stop_tokens) + STOPS)

    def decode_layout(self, **fields: Any) -> DecodeLayout:
        """Return the layout of a batch of decoding; `fields` are its own, beside those of this engine."""
        known = {"pages": self.pages_of_a_row, "vocab": self.vocab, "adapters": self.bank is not None}
        return DecodeLayout(**known | fields)

    def prefill(self, batch: PrefillBatch) -> tuple[Any, Any]:
        """Put the tokens of a batch into the pool; returns their routing and scores, or None (see `decode.prefill`)."""
        cache = self.cache
        with jax.set_mesh(self.mesh):
            params = self._with_adapters(self.params)
            cache.pool, recorded = self.steps.prefill(params, cache.pool, batch)
        return recorded

    def decode(self, batch: DecodeBatch, *, min_alive_rows: int, plain: bool, chunk: int = 1) -> dict[str, jax.Array]:
        """Start drawing; returns the arrays of `decode.decode`, or of `verify.decode_drafts` if the batch has drafts.

        Args:
            batch: one of the numbers of rows in `buckets`.
            min_alive_rows: rows left with which the dispatch ends.
            plain: the sampling parameters of every row are.
            chunk: tokens that a step feeds each row, with drafts.
        """
        size, tiled, cache = len(batch.feed), batch.shared is not None, self.cache
        with jax.set_mesh(self.mesh):
            windows = cache.windows(size, tiled=tiled)
            arrays = self._with_adapters(self.params), cache.pool, windows, batch, np.int32(min_alive_rows)
            cache.pool, windows, out = self.steps.decode(*arrays, plain=plain, chunk=chunk)
        cache.keep_windows(size, windows, tiled=tiled)
        return out

    def redraw(self, batch: DecodeBatch, *, plain: bool) -> dict[str, jax.Array]:
        """Start drawing over the drafts of a batch in one pass; returns the arrays of `verify.redraw`."""
        cache = self.cache
        with jax.set_mesh(self.mesh):
            arrays = self._with_adapters(self.params), cache.pool, batch
            cache.pool, out = self.steps.redraw(*arrays, plain=plain)
        return out


def _least_rows(dtype: Any, platform: str) -> int:
    """Return decoding's least rows: XLA for CPUs copies bfloat16 weights to multiply one, 3.6 times two's seconds."""
    return 2 if platform == "cpu" and np.dtype(dtype) == jax.numpy.bfloat16 else 1
