"""The jitted functions of a model runner: prefill, decoding, and copying and clearing of pages."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axlearn_like.kernels.exact.scope import COMPILER_OPTIONS, Numerics, numerics_of, use_numerics
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.base import bind
from axlearn_like.layers.wrappers.adapters import adapted
from mesh.generations import generation_of
from mesh.programs.shared import shared_program
from mesh.rules import use_rules
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.batches import DecodeBatch, PrefillBatch
from rl.rollout.model_runner.decode import DecodeSettings, copy_pages, decode, prefill, zero_pages
from rl.rollout.model_runner.verify import decode_drafts, redraw
from rl.rollout.sampling import recorded_candidates

# The compiler for tpu7x reads matrices of bfloat16 in tiles of 16 rows if it may. Arguments have tiles of 8: it would
# copy stacks of matrices in each dispatch, to save a hundredth of the cycles at most by its own estimate.
_TILES_OF_ARGUMENTS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": 0}

# XLA's own code for CPUs has vectors of 256 bits even where the CPU has 512: exponentials and SiLU take half as long in
# the wide ones. Scoring goes without, and equals the engine to the bit: products, sums and maxima are a library's, and
# of the rest only what whole vectors leave over is rounded otherwise: tanh, GELU and SiLU of rows of a few entries that
# are no multiple of 16. Policies with caps and GELU: tests/rl/rollout/test_engine_families.py.
_WIDE_VECTORS = {"xla_cpu_prefer_vector_width": "512"}


def jitted_steps(
    cfg: EngineConfig[Any],
    graphdef: Any,
    layers: int,
    mesh: Mesh,
    *,
    kernel: PagedKernel | None,
    in_pages: bool,
    adapters: bool,
) -> "JittedSteps":
    """Return the steps of an engine, those of an earlier one in this process if they compute the same.

    Args:
        graphdef: graph definition of the model, with the parameters that the steps are called with.
        kernel: kernel of attention, for TPUs; None: XLA.
        in_pages: decoding reads the pages themselves, and not windows.
        adapters: batches have them; told apart, as is the cache's type, so that what each kind of engine compiles can
            be counted.
    """
    settings = DecodeSettings(
        cfg.steps_per_dispatch, cfg.pool_pages, kernel, in_pages, recorded_candidates(cfg.sampler)
    )
    numerics, one_batch = numerics_of(cfg.model), mesh.shape["expert"] > 1
    options = _compiler_options(numerics, mesh.devices.flat[0])
    key = ("engine", graphdef, adapters, cfg.kv_cache_dtype, layers, settings, numerics, one_batch, options)
    return shared_program(key, partial(JittedSteps, graphdef, layers, settings, numerics, options, one_batch=one_batch))


def _compiler_options(numerics: Numerics, device: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options with which prefill and decoding are compiled for such a device."""
    generation = generation_of(device)
    options: dict[str, Any] = dict(COMPILER_OPTIONS) if numerics == "exact" else {}
    if generation is not None and generation.name == "tpu7x":
        options |= _TILES_OF_ARGUMENTS
    if device.platform == "cpu" and numerics != "exact":
        options |= _WIDE_VECTORS
    return tuple(options.items())


class JittedSteps:
    """The steps of engines of one kind, each with the model and its sizes bound to it.

    Attributes:
        prefill, decode, redraw, copy, zero, read, write: `run_prefill` and so on under `jax.jit`; pool and windows are
            donated, except by `read`.
        traces: how often one of them was traced: the number of programs compiled, of all engines that share them.
    """

    def __init__(
        self,
        graphdef: Any,
        layers: int,
        settings: DecodeSettings,
        numerics: Numerics,
        options: tuple[tuple[str, Any], ...],
        *,
        one_batch: bool,
    ):
        """Wrap the steps; nothing is traced yet.

        Args:
            one_batch: all devices have all rows; an axis for experts shards those and nothing else.
        """
        self._graphdef, self._layers, self._settings = graphdef, layers, settings
        self._pages, self._kernel = settings.pages, settings.kernel
        self._numerics: Numerics = numerics
        self._rules = {"batch": ()} if one_batch else None
        self.traces = 0
        jit = partial(jax.jit, compiler_options=dict(options) or None)
        self.prefill = jit(self.run_prefill, donate_argnums=1)
        self.decode = jit(self.run_decode, donate_argnums=(1, 2), static_argnames=("plain", "chunk"))
        self.redraw = jit(self.run_redraw, donate_argnums=1, static_argnames="plain")
        self.copy = jax.jit(self.run_copy, donate_argnums=0)
        self.zero = jax.jit(self.run_zero, donate_argnums=0)
        self.read = jax.jit(self.run_read)
        self.write = jax.jit(self.run_write, donate_argnums=0)

    def _model(self, params: Any, batch: PrefillBatch | DecodeBatch) -> Any:
        if batch.adapters is not None:  # rows of the bank are gathered here, once for all steps of a dispatch
            own, bank = params
            params = adapted(own, bank, batch.adapters, stacked=self._kernel is not None)
        return bind(self._graphdef, params)

    def _scope(self) -> AbstractContextManager[None]:
        """Return the scope of the numerics; where the engine's kernel is simulated, so are those of fixed order."""
        return use_numerics(self._numerics, interpret=self._kernel is not None and self._kernel.cfg.interpret)

    def run_prefill(self, params: Any, pool: Any, batch: PrefillBatch) -> Any:
        """Put the tokens of a batch into the pool (`decode.prefill`)."""
        self.traces += 1
        with use_rules(self._rules), self._scope():
            return prefill(self._model(params, batch), pool, batch, pages=self._pages, kernel=self._kernel)

    def run_decode(
        self,
        params: Any,
        pool: Any,
        windows: Any,
        batch: DecodeBatch,
        min_alive_rows: jax.Array,
        plain: bool,
        chunk: int = 1,
    ) -> Any:
        """Draw tokens for the rows of a batch (`decode.decode`, or with drafts `verify.decode_drafts`)."""
        self.traces += 1
        with use_rules(self._rules), self._scope():
            model = self._model(params, batch)
            if batch.draft is not None:
                arrays = model, pool, windows, batch, min_alive_rows
                return decode_drafts(*arrays, self._settings, chunk=chunk, plain=plain)
            return decode(model, pool, windows, batch, min_alive_rows, self._settings, plain=plain)

    def run_redraw(self, params: Any, pool: Any, batch: DecodeBatch, plain: bool) -> Any:
        """Draw over the drafts of a batch in one pass (`verify.redraw`)."""
        self.traces += 1
        with use_rules(self._rules), self._scope():
            return redraw(self._model(params, batch), pool, batch, self._settings, plain=plain)

    def run_copy(self, pool: Any, sources: jax.Array, targets: jax.Array) -> Any:
        """Copy pages."""
        self.traces += 1
        return copy_pages(pool, sources, targets, layers=self._layers, pages=self._pages)

    def run_zero(self, pool: Any, targets: jax.Array) -> Any:
        """Fill pages with zeros."""
        self.traces += 1
        return zero_pages(pool, targets, layers=self._layers, pages=self._pages)

    def run_read(self, pool: Any, sources: jax.Array) -> list[jax.Array]:
        """Return copies of pages, int32 [n]: of each array of the pool [n, layers, ...]."""
        self.traces += 1
        rows = sources[:, None] + jnp.arange(self._layers) * self._pages
        return [x[rows] for x in jax.tree.leaves(pool)]

    def run_write(self, pool: Any, targets: jax.Array, contents: list[jax.Array]) -> Any:
        """Write pages as `run_read` returns them; targets are distinct, except for the null page (padding)."""
        self.traces += 1
        rows = targets[:, None] + jnp.arange(self._layers) * self._pages
        leaves, tree = jax.tree.flatten(pool)
        return tree.unflatten([x.at[rows].set(new) for x, new in zip(leaves, contents, strict=True)])
