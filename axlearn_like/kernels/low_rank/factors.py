"""Arrays that make keys and values of a cache in rank space: second factors, biases, a norm of keys, a rotation.

A rotation at any position is that of the first position of its block and that of its place in the block, one behind
the other, so two small tables of cosines and sines serve sequences of any length.

Shape letters: k, h heads and their width, l rank, s keys of a block, b blocks, w padded width of a head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.paged_attention.rows import LANES, padded
from mesh.rules import partition


@dataclasses.dataclass(frozen=True)
class KeySteps:
    """Steps between the product that makes keys and attention."""

    freq: tuple[float, ...]  # frequencies of the rotation [h / 2]; empty: there is none
    factor: float  # factor of its cosines and sines
    eps: float | None  # epsilon of the norm; None: there is none
    biased: bool  # keys and values have a bias
    head_dim: int  # h


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueFactors:
    """Arrays of one layer; those that it lacks are None."""

    k_lkh: Any
    v_lkh: Any
    k_bias_kh: Any
    v_bias_kh: Any
    k_norm_h: Any
    steps: KeySteps = dataclasses.field(metadata={"static": True})

    def specs(self) -> "KeyValueFactors":
        """Return how the arrays are sharded: by heads."""
        matrix, bias = (None, "heads", None), ("heads", None)
        axes = {"k_lkh": matrix, "v_lkh": matrix, "k_bias_kh": bias, "v_bias_kh": bias, "k_norm_h": (None,)}
        specs = {name: partition(*of) for name, of in axes.items() if getattr(self, name) is not None}
        return dataclasses.replace(self, **specs)

    def rotation(self, keys: int, blocks: int) -> list[jax.Array]:
        """Return cosines and sines of the places in a block [s, w], and of the blocks' first positions [b, w]."""
        if not self.steps.freq:
            return []
        half = padded(self.steps.head_dim) // 2

        def table(positions: jax.Array, factor: float) -> jax.Array:
            angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(self.steps.freq, jnp.float32)
            sides = [
                jnp.pad(side, [(0, 0), (0, half - len(self.steps.freq))]) for side in (jnp.cos(angles), jnp.sin(angles))
            ]
            return factor * jnp.concatenate(sides, axis=1)

        return [table(jnp.arange(keys), self.steps.factor), table(keys * jnp.arange(blocks), 1.0)]


def make_rank_pool(layers: int, pages: int, page_size: int, rank: int, dtype: Any) -> dict[str, jax.Array]:
    """Return an empty pool [layers * pages, page_size, lines, 128], complete on every device.

    Line 2 * i of a token has numbers 128 * i and following of its keys in rank space, line 2 * i + 1 of its values.
    """
    lines = 2 * chunks_of(rank)
    return {"latent": jnp.zeros((layers * pages, page_size, lines, LANES), dtype, out_sharding=partition(*[None] * 4))}


def chunks_of(rank: int) -> int:
    """Return how many registers' widths a rank takes in a page: 1, 2, 4 or a multiple of 8, as lines are laid out."""
    wanted = -(-rank // LANES)
    return next(size for size in (1, 2, 4, -(-wanted // 8) * 8) if size >= wanted)


def numbers_of_page(rank: int) -> int:
    """Return how many numbers a page has for each token: keys and values, of this rank both."""
    return 2 * chunks_of(rank) * LANES


def in_halves(x: jax.Array) -> jax.Array:
    """Return heads as wide as registers, each half padded apart."""
    width, half = padded(x.shape[-1]) // 2, x.shape[-1] // 2
    if 2 * width == x.shape[-1]:
        return x
    sides = x[..., :half], x[..., half:]
    return jnp.concatenate([jnp.pad(side, [(0, 0)] * (x.ndim - 1) + [(0, width - half)]) for side in sides], axis=-1)
