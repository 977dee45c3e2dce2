"""The engine's device side: weights, the page pool, and compiled steps in few shapes.

Every array that goes in has one of a few sizes, so after each has been met once nothing is compiled.
"""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.config import ConfigBase
from axlearn_like.layers.attention.grouped_query import MERGEABLE
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.contexts.paged import NULL_PAGE, make_pool
from axlearn_like.layers.contexts.window import Cell, make_window
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from mesh import UserError, make_mesh, to_named_sharding
from rl.rollout.kv_cache.manager import PageCopy
from rl.rollout.model_runner.buckets import Buckets, bucket, halvings
from rl.rollout.model_runner.decode import Chunks, Rows, copy_pages, decode, prefill, zero_pages
from rl.rollout.sampling import Sampler, pack_bias, pack_metadata, plain
from rl.rollout.sequence import Sequence

if TYPE_CHECKING:
    from rl.rollout.engine import RolloutEngine

_COPIES = 64  # pages in one copying dispatch


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Weights on the engine's devices, in the engine's arrangement.

    Attributes:
        approximations: tags of rollouts drawn with them, if they are not the trainer's to the bit.
    """

    params: Params
    approximations: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One compiled program of the device.

    Attributes:
        kind: prefill, decode, copy or blank (pages).
        trace: returns the traced program; called with the mesh in force.
        rows: sequences, or pages.
        length: tokens of a sequence.
        plain: False where all rules of sampling apply.
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
        return f"{self.kind} pages"


class Device:
    """Runs prefill and decoding for sequences; knows nothing of queues."""

    def __init__(self, cfg: "RolloutEngine.Config", *, pages: int, longest: int, described: Items[Any] | None = None):
        """`described`: devices that are not there, to compile for (see aot.py); weights and pool are but described."""
        self._cfg, self._pages = cfg, pages
        self._mesh = make_mesh(cfg.mesh, described)
        if extra := {name: n for name, n in self._mesh.shape.items() if n > 1 and name != "tensor"}:
            raise UserError(
                f"RolloutEngine.mesh has {extra}; an engine is one tensor-parallel group: for more, run more workers"
            )
        self._kernel = self._mesh.devices.flat[0].platform == "tpu"
        self.params: Params | None = None
        self.traces = 0  # programs compiled
        self._windows: dict[tuple[int, int], list[Any]] = {}  # by (place of the group, its rows); see `_windows_of`
        with jax.set_mesh(self._mesh):
            abstract = jax.eval_shape(lambda: cfg.model.build(rngs=nnx.Rngs(0)))
            graphdef, arriving = split(abstract)
            self._abstract = to_named_sharding(arriving, self._mesh)
            plain = plain_config(cfg.model)  # what wrapped layers make of their weights is made once for each version
            self._made = None if plain == cfg.model else jax.jit(partial(plain_params, graphdef))
            self._graphdef, self._placed = split(jax.eval_shape(lambda: self._arranged(plain)))
            self._placed = to_named_sharding(self._placed, self._mesh)
            if self._kernel:
                from axlearn_like.kernels.ragged_paged_attention import check_rules

                check_rules(abstract.layers.attention.rules, abstract.layers.attention.sinks_kq is not None)
            self._layers, self.vocab = abstract.num_layers, abstract.vocab_size
            self._dtype = abstract.dtype
            empty = partial(self._empty_pool, *abstract.cache_shape)
            self._make_window = partial(self._empty_window, *abstract.cache_shape)
            self._pool = empty() if described is None else to_named_sharding(jax.eval_shape(empty), self._mesh)
        self.buckets = Buckets(
            max_num_seqs=cfg.max_num_seqs,
            steps=cfg.steps_per_dispatch,
            prefill_tokens=cfg.prefill_tokens,
            longest=longest,
            ragged=self._kernel,
            grouped=self._mesh.devices.flat[0].platform == "cpu",
        )
        self._compile()
        if described is not None:
            self.params = jax.tree_util.tree_map_with_path(self._stored, self._placed)

    def _arranged(self, cfg: ConfigBase) -> Any:
        """The model with its layers in a stack, for kernels that take layers in turn, or apart, for XLA."""
        model = cfg.build(rngs=nnx.Rngs(0))
        return model if self._kernel else model.unstack()

    def _empty_pool(self, kv_heads: int, head_dim: int) -> Any:
        if self._kernel:
            from axlearn_like.kernels.ragged_paged_attention import make_pool as make_kernel_pool

            return make_kernel_pool(self._layers, self._pages, self._cfg.page_size, kv_heads, head_dim, self._dtype)
        return make_pool(
            layers=self._layers,
            pages=self._pages,
            page_size=self._cfg.page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self._dtype,
        )

    def _empty_window(self, kv_heads: int, head_dim: int, rows: int) -> tuple[Cell, ...]:
        return make_window(rows, self.buckets.widest, kv_heads=kv_heads, head_dim=head_dim, dtype=self._dtype)

    def _compile(self) -> None:
        graphdef, pages, kernel, steps = self._graphdef, self._pages, self._kernel, self._cfg.steps_per_dispatch

        def run_prefill(params: Params, pool: Any, chunks: Chunks) -> Any:
            self.traces += 1
            return prefill(bind(graphdef, params), pool, chunks, pages=pages, kernel=kernel)

        def run_decode(params: Params, pool: Any, windows: Any, rows: Rows, quorum: jax.Array, plain: bool) -> Any:
            self.traces += 1
            model = bind(graphdef, params)
            return decode(model, pool, windows, rows, quorum, steps=steps, pages=pages, plain=plain, kernel=kernel)

        def run_copy(pool: Any, sources: jax.Array, targets: jax.Array) -> Any:
            self.traces += 1
            return copy_pages(pool, sources, targets, layers=self._layers, pages=pages)

        def run_blank(pool: Any, targets: jax.Array) -> Any:
            self.traces += 1
            return zero_pages(pool, targets, layers=self._layers, pages=pages)

        self._run_prefill = jax.jit(run_prefill, donate_argnums=1)
        self._run_decode = jax.jit(run_decode, donate_argnums=(1, 2), static_argnames="plain")
        self._run_copy = jax.jit(run_copy, donate_argnums=0)
        self._run_blank = jax.jit(run_blank, donate_argnums=0)

    # ---- weights

    @property
    def like(self) -> Params:
        """What arrives with the least copying: arrays arranged as the trainer's, in the types that are kept here."""

        def described(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dtype = self._type(path, leaf) if self._made is None else leaf.dtype
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

        return jax.tree_util.tree_map_with_path(described, self._abstract)

    def place(self, params: Params) -> Params:
        """The parameters where and as the engine wants them.

        Matrices are stored in the type that the model computes in; norms keep float32, as the trainer uses them.

        Raises:
            UserError: an array is missing, or has another shape.
        """
        wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self._abstract)}
        given = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        for name in sorted(wanted.keys() ^ given.keys()):
            raise UserError(f"weights: {name} is {'missing' if name in wanted else 'not part of the model'}")
        for name, leaf in wanted.items():
            if given[name].shape != leaf.shape:
                raise UserError(f"weights: {name} has shape {given[name].shape}; the model's is {leaf.shape}")

        def put(path: Any, leaf: Any, like: Any) -> jax.Array:
            return spread(leaf, like, self._stored(path, like))

        if self._made is not None:
            with jax.set_mesh(self._mesh):
                arrived = jax.tree.map(lambda leaf, like: spread(leaf, like, like), params, self._abstract)
                params = self._made(arrived)
        if not self._kernel:
            layers = {
                index: jax.tree.map(lambda leaf, i=index: leaf[i], params["layers"]) for index in range(self._layers)
            }
            params = {**params, "layers": layers}
        with jax.set_mesh(self._mesh):
            return jax.tree_util.tree_map_with_path(put, params, self._placed)

    def _stored(self, path: Any, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """What the engine keeps for a parameter of the model: its type, and its shape where the TPU likes another."""
        name, shape, sharding = _name(path), like.shape, like.sharding
        if self._kernel and name.endswith(MERGEABLE):  # [layers, d, *heads]
            shape = (*shape[:2], math.prod(shape[2:]))
            sharding = NamedSharding(self._mesh, PartitionSpec(*sharding.spec[:3]))
        return jax.ShapeDtypeStruct(shape, self._type(path, like), sharding=sharding)

    def _type(self, path: Any, like: jax.ShapeDtypeStruct) -> Any:
        return like.dtype if _name(path).endswith("scale") else self._dtype

    # ---- pages

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Of the devices, whether they are there or not."""
        return self._mesh

    @property
    def pool(self) -> Any:
        """The pages of all layers, or what they would be."""
        return self._pool

    def copy(self, copies: Items[PageCopy]) -> None:
        """Copy pages, in order; all reads of a batch come before its writes."""
        for first in range(0, len(copies), _COPIES):
            part = list(copies[first : first + _COPIES])
            part += [(NULL_PAGE, NULL_PAGE)] * (bucket(len(part), halvings(_COPIES, 4)) - len(part))
            sources, targets = np.array(part, np.int32).T
            with jax.set_mesh(self._mesh):
                self._pool = self._run_copy(self._pool, sources, targets)

    def blank(self, pages: Items[int]) -> None:
        """Fill pages with zeros."""
        for first in range(0, len(pages), _COPIES):
            targets = np.full(_COPIES, NULL_PAGE, np.int32)
            part = pages[first : first + _COPIES]
            targets[: len(part)] = part
            with jax.set_mesh(self._mesh):
                self._pool = self._run_blank(self._pool, targets)

    # ---- dispatches

    def prefill(self, chosen: Items[tuple[Sequence, int]]) -> None:
        """Put the next `count` tokens of each sequence into the pool."""
        _, chunk = self.buckets.prefill(max(count for _, count in chosen))
        rows = self.buckets.prefill_rows(len(chosen), chunk)
        width = self.buckets.width(max(sequence.cached + count for sequence, count in chosen))
        chunks = self._idle_chunks(rows, chunk, width)
        for row, (sequence, count) in enumerate(chosen):
            chunks.tokens[row, :count] = sequence.tokens[sequence.cached : sequence.cached + count]
            chunks.starts[row], chunks.counts[row] = sequence.cached, count
            used = sequence.pages[: chunks.page_table.shape[1]]
            chunks.page_table[row, : len(used)] = used
        with jax.set_mesh(self._mesh):
            self._pool = self._run_prefill(self.params, self._pool, chunks)

    def _idle_chunks(self, rows: int, chunk: int, width: int) -> Chunks:
        return Chunks(
            tokens=np.zeros((rows, chunk), np.int32),
            starts=np.zeros(rows, np.int32),
            counts=np.zeros(rows, np.int32),
            page_table=np.full((rows, width // self._cfg.page_size), NULL_PAGE, np.int32),
        )

    def decode(self, sequences: Items[Sequence], *, waiting: bool) -> dict[str, jax.Array]:
        """Start drawing; the arrays of `steps.decode`.

        Args:
            sequences: best the longest first.
            waiting: others could use a row that gets free.
        """
        size = self.buckets.rows(len(sequences))
        quorum = self.buckets.quorum(len(sequences), waiting=waiting)
        configs = [sequence.group.sampler for sequence in sequences]
        configs += [Sampler.Config()] * (size - len(sequences))
        rows = self._pack(sequences, configs, size)
        with jax.set_mesh(self._mesh):
            self._pool, windows, out = self._run_decode(
                self.params, self._pool, self._windows_of(size), rows, np.int32(quorum), plain=all(map(plain, configs))
            )
        for layer, groups in enumerate(windows):
            for key, cells in zip(enumerate(self.buckets.groups(size)), groups, strict=True):
                self._windows[key][layer] = cells
        return out

    def _windows_of(self, rows: int) -> list[list[Any]]:
        """Windows to decode in, by layer and group of rows; kept, since to get it anew takes a tenth of a dispatch."""
        if self._kernel:
            return []
        keys = list(enumerate(self.buckets.groups(rows)))
        for index, size in keys:
            if (index, size) not in self._windows:
                self._windows[index, size] = [self._make_window(size) for _ in range(self._layers)]
        return [[self._windows[key][layer] for key in keys] for layer in range(self._layers)]

    def _pack(self, sequences: Items[Sequence], configs: list[Sampler.Config], size: int) -> Rows:
        stops = max((len(sequence.group.stop.tokens) for sequence in sequences), default=0)
        columns = np.zeros((4, size), np.int32)
        rows = Rows(
            feed=columns[0],
            lengths=columns[1],
            ordinals=columns[2],
            remaining=columns[3],
            identity=np.zeros((size, 4), np.uint32),
            stop=np.full((size, max(4, 1 << max(0, stops - 1).bit_length())), -1, np.int32),
            page_table=np.full((size, self.buckets.widest // self._cfg.page_size), NULL_PAGE, np.int32),
            rules=pack_metadata(configs, self.vocab),
            bias=pack_bias(configs, self.vocab),
            seen=_seen(sequences, size, self.vocab),
        )
        for row, sequence in enumerate(sequences):
            request = sequence.group.request
            number = request.prompt.id
            columns[:, row] = (
                sequence.tokens[-1],
                sequence.cached,
                sequence.drawn,
                sequence.limit - len(sequence.tokens),
            )
            rows.identity[row] = request.seed & 0xFFFFFFFF, number >> 32, number & 0xFFFFFFFF, sequence.sample
            rows.stop[row, : len(sequence.group.stop.tokens)] = sequence.group.stop.tokens
            rows.page_table[row, : len(sequence.pages)] = sequence.pages[: rows.page_table.shape[1]]
        return rows

    # ---- ahead of time

    def dispatches(self) -> list[Dispatch]:
        """Return the dispatches that the device runs, of each kind the largest."""
        cfg = self._cfg
        ruled = Sampler.Config(top_p=0.9, repetition_penalty=1.1, logit_bias=((0, 1.0),))

        def prefill(rows: int, chunk: int) -> Any:
            return self._run_prefill.trace(self.params, self._pool, self._idle_chunks(rows, chunk, self.buckets.widest))

        def decode(sampler: Sampler.Config) -> Any:
            rows = self._pack([], [sampler] * cfg.max_num_seqs, cfg.max_num_seqs)
            if not plain(sampler):
                rows = dataclasses.replace(rows, seen=np.zeros((cfg.max_num_seqs, self.vocab), bool))
            windows = self._windows_of(cfg.max_num_seqs)
            return self._run_decode.trace(self.params, self._pool, windows, rows, np.int32(1), plain=plain(sampler))

        pages = np.zeros(_COPIES, np.int32)
        shapes = [self.buckets.prefill(chunk) for chunk in self.buckets.chunks]
        return [
            *(Dispatch("prefill", partial(prefill, rows, chunk), rows, chunk) for rows, chunk in shapes),
            Dispatch("decode", partial(decode, Sampler.Config()), cfg.max_num_seqs),
            Dispatch("decode", partial(decode, ruled), cfg.max_num_seqs, plain=False),
            Dispatch("copy", partial(self._run_copy.trace, self._pool, pages, pages), len(pages)),
            Dispatch("blank", partial(self._run_blank.trace, self._pool, pages), len(pages)),
        ]


def spread(leaf: Any, like: jax.ShapeDtypeStruct, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on the devices, first spread as `like` is, then in the shape of `stored`."""
    # Not by way of the default device, which could not hold a large model's stack of matrices.
    placed = jax.device_put(leaf.astype(stored.dtype), like.sharding)
    return placed if placed.shape == stored.shape else jnp.reshape(placed, stored.shape, out_sharding=stored.sharding)


def _seen(sequences: Items[Sequence], size: int, vocab: int) -> np.ndarray | None:
    """Bool [size, vocab], tokens so far, where a repetition penalty asks for them."""
    if all(sequence.group.sampler.repetition_penalty == 1 for sequence in sequences):
        return None
    seen = np.zeros((size, vocab), bool)
    for row, sequence in enumerate(sequences):
        seen[row, sequence.tokens] = True
    return seen


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
