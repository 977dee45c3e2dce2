"""Token embedding and output head."""

from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.kernels.exact.parts import sharing_axes
from axlearn_like.kernels.exact.scope import exact_kernels
from axlearn_like.layers.base import Layer, Workload, fan_in_init, param
from axlearn_like.layers.linear import project
from axlearn_like.layers.wrappers.matrix_forms import Transposed
from mesh.programs.draws import TruncatedNormal
from mesh.rules import axis_sizes, partition


class Embedding(Layer):
    """Token table [vocab, dim]; also the output head of models that tie the two."""

    fixed_order = True

    class Config(ConfigBase["Embedding"]):
        dim: int = REQUIRED
        vocab_size: int = REQUIRED
        init_std: float = 0.02

    max_length: int | None = None  # limit of sequence lengths; None: no limit
    logit_soft_cap: float | None = None

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        init = TruncatedNormal(cfg.init_std)
        self.weight_vd = param(rngs, (cfg.vocab_size, cfg.dim), ("vocab", "embed"), init)

    def __call__(self, tokens_bt: jax.Array, dtype: DTypeLike, context: Any = None) -> jax.Array:
        """Return the embeddings [batch, length, dim] in `dtype`; `context` knows the positions."""
        return _look_up(self.weight_vd[...], tokens_bt, dtype)

    def flops(self, work: Workload) -> float:
        """Return 0: a lookup multiplies nothing. As a tied head the table counts in `Decoder.flops`."""
        return 0.0

    @property
    def columns_dv(self) -> jax.Array:
        """The head's matrix, if the table is the head."""
        return self.weight_vd[...].T

    def factors(self, x_btd: jax.Array) -> jax.Array:
        """Return hidden states in the type of the factors of logits, which the matrix is cast to."""
        return x_btd

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab] by the transposed table."""
        x_btd = self.factors(x_btd)
        return project(x_btd, Transposed(self.weight_vd[...]), out_axis="vocab", dtype=jnp.float32)


class Float32Embedding(Embedding):
    """An embedding whose table, as the tied head, is multiplied unrounded: logits of float32 factors in any model."""

    fixed_order = True
    unrounded = ("weight_vd",)

    @override
    def factors(self, x_btd: jax.Array) -> jax.Array:
        return x_btd.astype(jnp.float32)


class ScaledEmbedding(Embedding):
    """An embedding that is multiplied by a constant, and, as the tied head, caps its logits: Gemma."""

    fixed_order = True

    class Config(Embedding.Config):
        scale: float | None = None  # factor of embeddings, in the activations' dtype; None: dim ** 0.5
        logit_soft_cap: float | None = None  # logits become cap * tanh(logit / cap); Gemma 2

        @override
        def check_fields(self) -> None:
            self.require("logit_soft_cap", self.logit_soft_cap is None or self.logit_soft_cap > 0, "above 0, or None")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.scale = cfg.dim**0.5 if cfg.scale is None else cfg.scale
        self.logit_soft_cap = cfg.logit_soft_cap

    @override
    def __call__(self, tokens_bt: jax.Array, dtype: DTypeLike, context: Any = None) -> jax.Array:
        """Return the scaled embeddings [batch, length, dim] in `dtype`."""
        x_btd = super().__call__(tokens_bt, dtype, context)
        return x_btd * jnp.asarray(self.scale, x_btd.dtype)

    @override
    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab] after the soft cap."""
        logits, cap = super().logits(x_btd), self.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class PositionedEmbedding(Embedding):
    """The sum of a token's embedding and one of its position, both learned: GPT-2."""

    fixed_order = True

    class Config(Embedding.Config):
        max_length: int = REQUIRED  # positions

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_length")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        init = TruncatedNormal(cfg.init_std)
        self.positions_vd = param(rngs, (cfg.max_length, cfg.dim), (None, "embed"), init)
        self.max_length = cfg.max_length

    @override
    def __call__(self, tokens_bt: jax.Array, dtype: DTypeLike, context: Any = None) -> jax.Array:
        """Return the sums [batch, length, dim] in `dtype`."""
        # Padding of a chunk may stand behind the last position.
        positions_bt = jnp.minimum(context.positions, self.positions_vd.shape[0] - 1)
        return super().__call__(tokens_bt, dtype) + _look_up(self.positions_vd[...], positions_bt, dtype)


class Head(Layer):
    """An untied output head."""

    fixed_order = True

    logit_soft_cap: float | None = None

    class Config(ConfigBase["Head"]):
        dim: int = REQUIRED
        vocab_size: int = REQUIRED

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.weight_dv = param(rngs, (cfg.dim, cfg.vocab_size), ("embed", "vocab"), fan_in_init(cfg.dim))

    @property
    def columns_dv(self) -> jax.Array:
        """The head's matrix."""
        return self.weight_dv[...]

    def factors(self, x_btd: jax.Array) -> jax.Array:
        """Return hidden states in the type of the factors of logits, which the matrix is cast to."""
        return x_btd

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab]."""
        return project(self.factors(x_btd), self.weight_dv[...], out_axis="vocab", dtype=jnp.float32)


class CappedHead(Head):
    """An output head with a soft cap: Gemma 2 where its table is not the head."""

    fixed_order = True

    class Config(Head.Config):
        logit_soft_cap: float = REQUIRED  # logits become cap * tanh(logit / cap)

        @override
        def check_fields(self) -> None:
            self.require("logit_soft_cap", self.logit_soft_cap > 0, "above 0")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.logit_soft_cap = cfg.logit_soft_cap

    @override
    def logits(self, x_btd: jax.Array) -> jax.Array:
        """Return float32 logits [batch, length, vocab] after the soft cap."""
        assert self.logit_soft_cap is not None
        return self.logit_soft_cap * jnp.tanh(super().logits(x_btd) / self.logit_soft_cap)


class Float32Head(Head):
    """An output head whose matrix is multiplied unrounded: logits of float32 factors in a model of any type."""

    fixed_order = True
    unrounded = ("weight_dv",)

    @override
    def factors(self, x_btd: jax.Array) -> jax.Array:
        return x_btd.astype(jnp.float32)


def _look_up(table: Any, tokens_bt: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return rows of a table, [batch, length, dim], sharded as activations are; of a `QArray` as floats."""
    if hasattr(table, "qvalue"):  # numbers, and a scale for each row: they become floats behind the lookup
        numbers, scales = (_look_up(part, tokens_bt, part.dtype) for part in (table.qvalue, table.scale))
        # Not fused: a sum that follows would be taken of products that are not rounded, on CPUs.
        return no_fuse((numbers.astype(scales.dtype) * scales).astype(dtype))
    table, spec = table.astype(dtype), partition("batch", "length", None)
    if spec is None:
        return table[tokens_bt]
    # Each device looks up its columns for the rows of all devices that hold other columns, and they exchange the
    # results: little beside a whole table, and the same in reverse for the gradient.
    columns = axis_sizes("embed")
    rows = tuple(name for name, size in axis_sizes("batch").items() if name not in columns and size > 1) or None
    tokens_bt = jax.sharding.reshard(tokens_bt, PartitionSpec(rows, spec[1]))
    out = PartitionSpec(rows, spec[1], *(partition("embed") or ()))
    x_btd = _own_words(table, tokens_bt, out) if exact_kernels() else table.at[tokens_bt].get(out_sharding=out)
    return jax.sharding.reshard(x_btd, spec)


def _own_words(table: jax.Array, tokens_bt: jax.Array, out: PartitionSpec) -> jax.Array:
    """Return rows of a table of which each device may have some words, without a sum of floats over devices.

    The bits of a word's embedding are added to zeros as an integer, so its sign stays even where it is zero.
    """
    if not (names := sharing_axes("vocab")):
        return table.at[tokens_bt].get(out_sharding=out)

    def own(table: jax.Array, tokens_bt: jax.Array) -> jax.Array:
        places = tokens_bt - jax.lax.axis_index(names) * len(table)
        mine = (places >= 0) & (places < len(table))
        found = table[jnp.where(mine, places, 0)]
        numbers = jax.lax.bitcast_convert_type(found, jnp.dtype(f"int{8 * found.dtype.itemsize}"))
        numbers = jax.lax.psum(jnp.where(mine[..., None], numbers, 0).astype(jnp.int32), names)
        return jax.lax.bitcast_convert_type(numbers.astype(f"int{8 * found.dtype.itemsize}"), found.dtype)

    specs = PartitionSpec(names, *out[2:]), PartitionSpec(*out[:2])
    return jax.shard_map(own, in_specs=specs, out_specs=out, check_vma=False)(table, tokens_bt)
