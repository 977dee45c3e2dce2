"""Factorised layers: an engine holds matrices as products of two narrow ones, by (whitened) singular vectors.

`FactorisedWeights` describes what is held; `factorised_config` and `factorised_params` give a model's config and
parameters in this form. Layers compute as they are, since `project` multiplies with both factors in turn.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axlearn_like.config import REQUIRED, ConfigBase, path_of, replace
from axlearn_like.layers.attention.grouped_query import Attention, BiasedAttention
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Params, Workload, bind, split
from axlearn_like.layers.block_pattern import Segment, scan_segment
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.parameter_names import axes_of_matrix
from axlearn_like.layers.wrappers.base import Wrapper, parameter, projected, replaced
from axlearn_like.layers.wrappers.low_rank.matrices import FactorisedMatrix, factorise, smaller_rank
from axlearn_like.layers.wrappers.matrix_forms import Watched
from mesh.devices import platform
from mesh.errors import UserError
from mesh.rules import axis_sizes
from mesh.sharding import token_axes


class FactorisedWeights(Wrapper):
    """The inner layer with matrices held as factors, to be read and not to be trained.

    Parameters are those of the inner layer, with factors at `.../q_dkqh/a` and `.../q_dkqh/b`. A matrix that its rank
    would not make smaller stays whole.
    """

    class Config(Wrapper.Config):
        inner: ConfigBase = REQUIRED
        share: float = 0.75  # upper bound on factor size, as a share of the matrix's elements
        rank: int | None = None  # rank of every matrix, instead of a share
        layers: tuple[Literal["attention", "feed_forward"], ...] = ("attention", "feed_forward")  # sublayers changed
        # A source of rows of tokens (input/source.py), whose activations say which errors matter; None: plain SVD.
        calibration: ConfigBase | None = None
        fused: bool = True  # gated feed-forward networks by a kernel of ours on TPUs, where that saves memory
        rank_cache: bool = False  # pages hold keys and values in rank space, from which they are made again when read

        @override
        def check_fields(self) -> None:
            self.require("share", 0 < self.share < 1, "a share, above 0 and below 1")
            self.require_least(1, "rank")
            self.require("layers", bool(self.layers), "attention, feed_forward or both")
            self.require("layers", "attention" in self.layers or not self.rank_cache, "attention too with rank_cache")

        @property
        def tags(self) -> tuple[str, ...]:
            """Approximations of what is drawn with such weights."""
            return ("low-rank-weights",)

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        known = {name for name, _ in projected(self.inner)}
        if others := [name for name in self.names if name not in known]:
            raise UserError(
                f"{path_of(cfg)}: {others[0]} of {type(self.inner).__name__} is not multiplied as two factors, as "
                "experts are not; expected other `layers`, or a `match` or `skip` that leaves it out"
            )
        self.fused = cfg.fused
        params = split(self.inner)[1]
        sides = [_Sides.of(name, parameter(params, name)) for name in self.names]
        ranks = [smaller_rank(*side.sizes, cfg.share) if cfg.rank is None else cfg.rank for side in sides]
        fitting = [side.saves(rank) for side, rank in zip(sides, ranks, strict=True)]
        field, first = "share" if cfg.rank is None else "rank", sides[0].sizes
        wanted = f"one with which factors are smaller than a matrix, as of {first[0]} x {first[1]}"
        cfg.require(field, any(fitting), wanted)
        self.ranks = tuple(rank if fits else None for rank, fits in zip(ranks, fitting, strict=True))
        nnx.update(self.inner, self._with_factors(params, lambda side, rank, weight: side.zeros(rank, weight)))
        if cfg.rank_cache and hasattr(self.inner, "cache_shape"):
            self.cache_ranks = self._checked_cache(cfg)
            self.latent_width = sum(self.cache_ranks)

    def _checked_cache(self, cfg: Config) -> tuple[int, int]:
        """Return the ranks of keys and values, of which a cache in rank space has tokens."""
        layer, of = self.inner, dict(zip(self.names, self.ranks, strict=True))
        plain = type(layer) in (Attention, BiasedAttention)  # layers with keys that `RankSpace` can make
        cfg.require("rank_cache", plain, f"False with {type(layer).__name__}, which is not grouped-query attention")
        for name in ("k_dkh", "v_dkh"):
            cfg.require("rank_cache", of.get(name) is not None, f"False where {name} stays whole, as by match or rank")
        ranks = of["k_dkh"] or 0, of["v_dkh"] or 0
        own = 2 * math.prod(layer.cache_shape) // math.prod(axis_sizes("heads").values())
        wanted = f"False: {ranks[0]} + {ranks[1]} numbers of a token are not fewer than its {own} of a device's heads"
        cfg.require("rank_cache", sum(ranks) < own, wanted)
        return ranks

    def factored(self, params: Params, inputs: Mapping[str, jax.Array] | None) -> Params:
        """Return the inner layer's parameters of one layer as they are held.

        Args:
            inputs: activations [tokens, in] of each matrix, by its name; None: by plain singular vectors.
        """

        def factors(side: _Sides, rank: int, weight: jax.Array) -> FactorisedMatrix:
            whole = _replicated(weight).reshape(side.sizes)
            found = factorise(whole, rank, None if inputs is None else _replicated(inputs[side.name]))
            return side.placed(found, weight)

        return self._with_factors(params, factors)

    def _with_factors(self, params: Params, factors: Any) -> Params:
        weights = {name: (rank, parameter(params, name)) for name, rank in zip(self.names, self.ranks, strict=True)}
        new = {name: factors(_Sides.of(name, weight), rank, weight) for name, (rank, weight) in weights.items() if rank}
        return replaced(params, new)

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner layer returns for activations x: its products are with both factors."""
        if self.fused and (y := _fused(self.inner, x)) is not None:
            return y, Aux()
        return self.inner(x, *args, **kwargs)

    @override
    def flops(self, work: Workload) -> float:
        """Return the FLOPs of the inner layer, with products with both factors for those with their matrices."""
        params, total = split(self.inner)[1], self.inner.flops(work)
        for name in self.names:
            held = parameter(params, name)
            if isinstance(held, FactorisedMatrix):
                total += 2.0 * work.tokens * (held.a.size + held.b.size - math.prod(held.shape))
        return total


@dataclasses.dataclass(frozen=True)
class _Sides:
    """Inputs and outputs of a matrix of one layer, by the positions of their axes."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, int]

    @classmethod
    def of(cls, name: str, weight: Any) -> "_Sides":
        axes = axes_of_matrix(name, weight.ndim)
        assert not axes.stack, "one layer's, and no experts"
        inputs, outputs = (math.prod(weight.shape[i] for i in side) for side in (axes.inputs, axes.outputs))
        return cls(name, axes.inputs, axes.outputs, (inputs, outputs))

    def saves(self, rank: int) -> bool:
        return 0 < rank * sum(self.sizes) < math.prod(self.sizes)

    def placed(self, factors: tuple[jax.Array, jax.Array], weight: jax.Array) -> FactorisedMatrix:
        """Return factors [in, rank] and [rank, out] with the axes of the matrix, sharded as these are."""
        (a, b), spec = factors, _spec(weight)
        a = a.reshape(*(weight.shape[i] for i in self.inputs), a.shape[-1]).astype(weight.dtype)
        b = b.reshape(b.shape[0], *(weight.shape[i] for i in self.outputs)).astype(weight.dtype)
        if spec is not None:
            a = jax.sharding.reshard(a, PartitionSpec(*(spec[i] for i in self.inputs), None))
            b = jax.sharding.reshard(b, PartitionSpec(None, *(spec[i] for i in self.outputs)))
        return FactorisedMatrix(a, b)

    def zeros(self, rank: int, weight: jax.Array) -> FactorisedMatrix:
        return self.placed((jnp.zeros((self.sizes[0], rank)), jnp.zeros((rank, self.sizes[1]))), weight)


def _fused(layer: Any, x_btd: jax.Array) -> jax.Array | None:
    """Return the output of a gated network by the kernel for TPUs; None where XLA computes it.

    The kernel has three matrices and `combine`: a layer with more parameters (biases) or other steps is XLA's.
    """
    if type(layer).__call__ is not SwiGLU.__call__ or not layer.holds_only(*SwiGLU.projected):
        return None
    matrices = [one[...] for one in (layer.gate_df, layer.up_df, layer.down_fd)]
    pairs = [(one.a, one.b) for one in matrices if isinstance(one, FactorisedMatrix)]
    if platform() != "tpu" or len(pairs) < len(matrices) or token_axes(x_btd):
        return None
    from axlearn_like.kernels.low_rank.feed_forward import GLUFactors, by_kernel, fits  # Pallas: slow to import

    factors = GLUFactors(*(factor for pair in pairs for factor in pair))
    x_nd = x_btd.reshape(-1, x_btd.shape[-1])
    return by_kernel(x_nd, factors, layer.combine).reshape(x_btd.shape) if fits(factors, len(x_nd)) else None


def factorised_config[C: ConfigBase[Any]](model: C, how: FactorisedWeights.Config) -> C:
    """Return a copy of a model's config, plain for an engine, that holds the matrices of its blocks so."""
    how.check_fields()  # here it has the path that the user set
    made = model.clone()
    wrapped = lambda block: {name: how.clone(inner=getattr(block, name)) for name in how.layers}  # noqa: E731
    replace(made, Block.Config, lambda block: block.set(**wrapped(block)))
    return made


class CalibrationRows(NamedTuple):
    """Rows of text, whose activations whiten."""

    tokens: Any  # int32 [rows, length]
    live: Any  # bool [rows, length], False at padding behind the text


def factorised_params(plain: Any, held: Any, params: Params, rows: CalibrationRows | None = None) -> Params:
    """Return a decoder's parameters as those of `factorised_config`'s.

    Pure; to be jitted, under the mesh if there is one. Factors are made layer by layer, within one pass of the text
    through the plain model, so inputs of one layer exist at a time.

    Args:
        plain: the decoder, with stacks of layers; it may be abstract.
        held: that of `factorised_config`, in the same way.
        rows: text for whitening; None: by plain singular vectors.
    """
    model, made, x = bind(split(plain)[0], params), dict(params), None
    if rows is not None:
        positions = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
        context = RowContext(positions, jnp.asarray(rows.live))
        x = model.embedding(jnp.asarray(rows.tokens), model.dtype, context)
    else:
        context = None
    for segment in model.segments:
        block = getattr(held, segment.name)
        steps = [partial(_layer, segment, kind, block, context) for kind in range(segment.period)]
        x, made[segment.name] = scan_segment(steps, x, getattr(model, segment.name))
    return made


def _layer(segment: Segment, kind: int, held: Any, context: RowContext | None, x: Any, layer: Any) -> tuple[Any, Any]:
    """Return the activations behind a layer, and its parameters as they are held."""
    graphdef, params = split(segment.block(layer, kind))
    if context is None:
        return None, _held(held, params, None, "")
    seen: dict[str, jax.Array] = {}
    watched = {path: Watched(weight, partial(seen.__setitem__, path)) for path, weight in projected(layer)}
    x, *_ = bind(graphdef, replaced(params, watched))(x, context, None)
    live = context.live.reshape(-1, 1)
    inputs = {path: jnp.where(live, _replicated(inputs).reshape(len(live), -1), 0) for path, inputs in seen.items()}
    return x, _held(held, params, inputs, "")


def _held(held: Any, params: Params, inputs: Mapping[str, jax.Array] | None, path: str) -> Params:
    if isinstance(held, FactorisedWeights):
        own = None if inputs is None else {name: inputs[path + name] for name in held.names}
        return {"inner": held.factored(params, own)}
    return {
        name: _held(getattr(held, name), value, inputs, f"{path}{name}/") if isinstance(value, dict) else value
        for name, value in params.items()
    }


def _spec(x: jax.Array) -> PartitionSpec | None:
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec


def _replicated(x: jax.Array) -> jax.Array:
    return x if _spec(x) is None else jax.sharding.reshard(x, PartitionSpec())
