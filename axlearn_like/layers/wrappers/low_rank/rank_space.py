"""Keys and values that are cached in rank space: of factors [in, rank] and [rank, out] the first product alone.

An engine that holds the projections of keys and values as factors (factorised.py) may cache x A, the inputs of
the second factors, in the place of keys and values: `rank` numbers of a token for all heads of each. Where they are
read they are multiplied with B, biased, normed and rotated at their positions, by the same products and functions as
new ones, so every bit is the same; on TPUs by a kernel, in fast memory (kernels/low_rank).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors
from axlearn_like.layers.attention.rope import InterleavedRope, NoPositions, Rope
from axlearn_like.layers.linear import project
from axlearn_like.layers.wrappers.low_rank.matrices import FactorisedMatrix
from mesh.rules import partition


@dataclasses.dataclass(frozen=True)
class RankSpace:
    """Keys and values of an attention layer whose two projections are factors."""

    layer: Any  # an `Attention`

    @property
    def _matrices(self) -> tuple[FactorisedMatrix, FactorisedMatrix]:
        k, v = self.layer.k_dkh[...], self.layer.v_dkh[...]
        assert isinstance(k, FactorisedMatrix) and isinstance(v, FactorisedMatrix)
        return k, v

    def of(self, x_btd: jax.Array) -> jax.Array:
        """Return what is cached of tokens: keys, then values, in rank space, [b, t, ranks of both]."""
        return jnp.concatenate([project(x_btd, matrix.a) for matrix in self._matrices], axis=-1)

    def __call__(self, latent_btw: jax.Array, positions_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values [b, t, k, h] of what is cached of tokens at these positions."""
        layer, (k, v) = self.layer, self._matrices
        rank = k.b.shape[0]

        def heads(low: jax.Array, matrix: FactorisedMatrix, bias: Any) -> jax.Array:
            y = project(low, matrix.b, out_axis="heads", out=layer.cache_shape)
            return y if bias is None else y + bias[...].astype(y.dtype)

        keys = heads(latent_btw[..., :rank], k, layer.k_bias_kh)
        keys = keys if layer.k_norm is None else layer.k_norm(keys)
        values = heads(latent_btw[..., rank:], v, layer.v_bias_kh)
        return layer.rope.rotation(positions_bt)(keys), values

    @property
    def steps(self) -> KeySteps:
        """Steps of the kernel between the product that makes keys and attention."""
        rope, norm = self.layer.rope, self.layer.k_norm
        return KeySteps(
            freq=rope.freq if isinstance(rope, Rope) else (),
            factor=rope.factor if isinstance(rope, Rope) else 1.0,
            eps=None if norm is None else norm.eps,
            biased=self.layer.k_bias_kh is not None,
            head_dim=self.layer.cache_shape[1],
        )

    def kernel_factors(self) -> KeyValueFactors:
        """Return the arrays that the kernel makes keys and values with."""
        layer, norm = self.layer, self.layer.k_norm

        def of_heads(matrix: FactorisedMatrix) -> jax.Array:
            spec = partition(None, "heads", None)
            return jnp.reshape(matrix.b, (matrix.b.shape[0], *layer.cache_shape), out_sharding=spec)

        k_bias, v_bias = (None if bias is None else bias[...] for bias in (layer.k_bias_kh, layer.v_bias_kh))
        scale = None if norm is None else norm.factor
        k, v = map(of_heads, self._matrices)
        return KeyValueFactors(k, v, k_bias, v_bias, scale, self.steps)


def unknown_rotation(rope: Any) -> str | None:
    """Return the name of a rotation of keys that the kernel for TPUs does not have; None: it has it."""
    if isinstance(rope, Rope) and rope.growth is not None:
        return f"{type(rope).__name__} with DynamicScaling"
    known = isinstance(rope, Rope | NoPositions) and not isinstance(rope, InterleavedRope)
    return None if known else type(rope).__name__
