"""Low-rank adaptation (LoRA, Hu et al. 2021, arXiv 2106.09685): a frozen layer and small trained matrices."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from axlearn_like.config import path_of
from axlearn_like.layers.base import Initializer, Params, bind, fan_in_init, placed_param, split
from axlearn_like.layers.parameter_names import axes_of_matrix, shape_suffix
from axlearn_like.layers.wrappers.base import Wrapper, parameter, projected, replaced
from axlearn_like.layers.wrappers.int8_base import float_matrix, int8_numbers, scale_name
from axlearn_like.layers.wrappers.low_rank.matrices import AddedProduct, current_dropout_key
from mesh.errors import UserError


class LoRA(Wrapper):
    """The inner layer with W + alpha / rank * a b in place of every matrix W.

    The factors of `q_dkqh` are `lora/q_a_dl`, random, and `lora/q_b_lkqh`, zero: at first the layer is the inner one.
    Experts have factors of their own (`gate_a_edl`). They are sharded as the matrix is, except for the rank.

    The sum is computed, one layer at a time, and then multiplied with: any layer can be wrapped, and merging changes
    nothing but rounding. It saves the optimizer's state, not work: the gradient of the sum is computed too.

    With `separate`, x W + scale (x a) b is computed of the matrices that rows go through one by one: no sum, and no
    gradient of W, which is a third of the work of a step. An engine that has the adapter beside its base computes so,
    too. Other matrices, as of experts, have their sum.

    With `magnitudes` (DoRA, Liu et al. 2024, arXiv 2402.09353) each output of the sum has a norm of its own, trained
    too: W' = m (W + alpha / rank * a b) / |W + alpha / rank * a b|, with norms over the inputs, through which no
    gradient flows, and `lora/q_scale_kqh`, the norms of W at first.

    With `dropout`, steps of training compute x W + scale (dropout(x) a) b instead, each matrix with a mask of its own.
    The keys follow from step, microbatch, layer and matrix, so a run that is resumed draws the same.

    With `base` the frozen matrices are held as int8 numbers, with `base/q_scale_kqh` for their outputs, and are floats
    one layer at a time (as QLoRA, Dettmers et al. 2023, arXiv 2305.14314, which has four bits).

    The learner chooses what is trained:

        groups=(ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True))

    >>> from axlearn_like.config import replace
    >>> from axlearn_like.layers.attention.grouped_query import Attention
    >>> from axlearn_like.layers.wrappers.lora import LoRA
    >>> from models.tiny import tiny
    >>> policy = tiny(vocab_size=272)
    >>> replace(policy, Attention.Config, lambda attention: LoRA.Config(inner=attention, rank=4, match="[qv]_*"))
    1
    >>> policy.block.attention.rank
    4
    """

    class Config(Wrapper.Config):
        rank: int = 8
        alpha: float = 16.0
        separate: bool = False  # multiply by the factors on their own, where rows go through a matrix one by one
        dropout: float = 0.0  # dropout rate of A's input in training; the product is then computed separately
        magnitudes: bool = False  # DoRA: learn magnitude and direction separately
        base: Literal["int8"] | None = None  # numbers that hold the frozen matrices; None: float32
        rank_stabilised: bool = False  # alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)

        @override
        def check_fields(self) -> None:
            self.require_least(1, "rank")
            self.require("dropout", 0 <= self.dropout < 1, "a share, 0 or more and below 1")
            self.require(
                "dropout", not (self.dropout and self.magnitudes), "0 with magnitudes, whose norms are of a sum"
            )
            alone = not (self.separate and self.magnitudes)
            self.require("separate", alone, "False with magnitudes, whose norms are of a sum")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.dropout = cfg.dropout
        self.apart: frozenset[str] = frozenset()  # matrices whose factors are multiplied with on their own
        if cfg.separate or self.dropout:
            self.apart = frozenset(self.names).intersection(path for path, _ in projected(self.inner))
        self.separate = cfg.separate
        if self.dropout:
            other = sorted(set(self.names).difference(self.apart))
            if other:
                said = f"expected 0 with {other[0]}, which rows do not go through one by one; see `skip`"
                raise UserError(f"{path_of(cfg)}.dropout: {said}")
        self.magnitudes = cfg.magnitudes
        self.scale = cfg.alpha / (math.sqrt(cfg.rank) if cfg.rank_stabilised else cfg.rank)
        params = split(self.inner)[1]
        weights = {name: parameter(params, name) for name in self.names}
        self.lora = nnx.data(_nested(one for name, w in weights.items() for one in _factors(name, w, cfg, rngs)))
        self.int8 = cfg.base is not None
        if self.int8:
            held = {name: int8_numbers(name, weight) for name, weight in weights.items()}
            nnx.update(self.inner, replaced(params, {name: numbers for name, (numbers, _) in held.items()}))
            scales = ((scale_name(name, numbers.ndim), nnx.Param(scale)) for name, (numbers, scale) in held.items())
            self.base = nnx.data(_nested(scales))

    def weights(self, params: Params) -> Params:
        """Return the weights with the low-rank products added."""
        return self._with_sums(params, self.names)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner layer returns, with dropout if this is a step of training."""
        key = current_dropout_key() if self.dropout else None
        if key is None and not self.separate:
            return super().__call__(*args, **kwargs)
        graphdef, params = split(self.inner)
        params = self._floats(params)
        factors, new = nnx.to_pure_dict(nnx.state(self))["lora"], {}
        for name in (name for name in self.names if name in self.apart):
            weight = parameter(params, name)
            names = factor_names(name, weight.ndim)
            own = None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
            a, b = parameter(factors, names.a), parameter(factors, names.b)
            new[name] = AddedProduct(weight, a, self.scale * b, own, self.dropout)
        summed = self._with_sums(params, [name for name in self.names if name not in new])
        return bind(graphdef, replaced(summed, new))(*args, **kwargs)

    def _with_sums(self, params: Params, chosen: Sequence[str]) -> Params:
        """Return parameters of the inner layer with the low-rank products added to these matrices."""
        factors, params = nnx.to_pure_dict(nnx.state(self))["lora"], self._floats(params)
        new = {}
        for name in chosen:
            weight = parameter(params, name)
            names = factor_names(name, weight.ndim)
            update = jnp.einsum(
                names.product,
                parameter(factors, names.a),
                parameter(factors, names.b),
                out_sharding=None if jax.sharding.get_abstract_mesh().empty else jax.typeof(weight).sharding.spec,
            )
            if axes_of_matrix(name, weight.ndim).stack and isinstance(weight, Tracer):
                # Keep experts in the layout of storage: else XLA transposes all layers' at once, which is a copy.
                weight = with_layout_constraint(weight, Layout(tuple(range(weight.ndim))))
            new[name] = weight + (self.scale * update).astype(weight.dtype)
            if self.magnitudes:
                new[name] = with_magnitude(name, new[name], parameter(factors, names.magnitude))
        return replaced(params, new)

    def _floats(self, params: Params) -> Params:
        """Return parameters of the inner layer with float32 matrices in the place of int8 numbers."""
        held = {name: weight for name in self.names if (weight := parameter(params, name)).dtype == jnp.int8}
        scales = nnx.to_pure_dict(nnx.state(self))["base"] if held else {}
        made = {name: float_matrix(name, w, parameter(scales, scale_name(name, w.ndim))) for name, w in held.items()}
        return replaced(params, made)

    def used_share(self, path: str) -> float:
        """Return the share of a factor that each token meets: that of the matrix which it changes."""
        layer, share = self.inner, 1.0
        for name in path.split("/")[1:-1]:  # lora/experts/gate_a_edl
            share, layer = share * layer.used_share(name), getattr(layer, name)
        return share


class FactorNames(NamedTuple):
    """Paths of a matrix's factors and magnitudes, and the einsum of the product, for stacks of layers too."""

    a: str
    b: str
    product: str
    magnitude: str


def factor_names(name: str, ndim: int) -> FactorNames:
    """Return the names of the factors: `q_dkqh` -> `q_a_dl`, `q_b_lkqh`, `...dl,...lkqh->...dkqh`, `q_scale_kqh`."""
    suffix = shape_suffix(name, ndim)
    stack, inputs, outputs = ("".join(suffix[axis] for axis in part) for part in axes_of_matrix(name, len(suffix)))
    stem, a, b = name.removesuffix(f"_{suffix}"), f"{stack}{inputs}l", f"{stack}l{outputs}"
    return FactorNames(f"{stem}_a_{a}", f"{stem}_b_{b}", f"...{a},...{b}->...{suffix}", scale_name(name, ndim))


def norms(name: str, weight: jax.Array) -> jax.Array:
    """Return the norm of each output of a matrix, or of each of a stack of them, without the axes of inputs."""
    return jnp.sqrt(jnp.sum(weight * weight, axis=axes_of_matrix(name, weight.ndim).inputs))


def with_magnitude(name: str, weight: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Return a matrix whose outputs have these norms."""
    share = magnitude / jax.lax.stop_gradient(norms(name, weight)).astype(magnitude.dtype)
    return weight * jnp.expand_dims(share, axes_of_matrix(name, weight.ndim).inputs).astype(weight.dtype)


def _nested(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return values by their paths as nested dicts."""
    made: dict[str, Any] = {}
    for path, value in parts:
        *folders, last = path.split("/")
        folder = made
        for key in folders:
            folder = folder.setdefault(key, {})
        folder[last] = value
    return made


def _factors(
    name: str, weight: jax.Array, cfg: LoRA.Config, rngs: nnx.Rngs
) -> Iterator[tuple[str, nnx.Param[jax.Array]]]:
    """Yield the factors of one layer's matrix, and its magnitudes if it has them, by their paths."""
    names, axes = factor_names(name, weight.ndim), axes_of_matrix(name, weight.ndim)
    meshless = jax.sharding.get_abstract_mesh().empty
    sharding: Any = [None] * weight.ndim if meshless else jax.typeof(weight).sharding.spec

    def born(init: Initializer, *dimensions: int | None) -> nnx.Param[jax.Array]:
        """Return a factor with the axes of the matrix at these dimensions; None: the rank."""
        shape = tuple(cfg.rank if dimension is None else weight.shape[dimension] for dimension in dimensions)
        spec = PartitionSpec(*(None if dimension is None else sharding[dimension] for dimension in dimensions))
        return placed_param(rngs, shape, init, weight.dtype, None if meshless else spec)

    fan_in = math.prod(weight.shape[axis] for axis in axes.inputs)
    yield names.a, born(fan_in_init(fan_in), *axes.stack, *axes.inputs, None)
    yield names.b, born(jax.nn.initializers.zeros, *axes.stack, None, *axes.outputs)
    if cfg.magnitudes:
        yield names.magnitude, nnx.Param(norms(name, weight))
