"""A matrix to which every row of a batch adds its own low-rank product: several LoRA adapters in one forward pass.

The way was chosen by counting. For r rows of one token, s adapters of rank l, and a matrix [d, o]:

* a gather of each row's factors moves r (d + o) l numbers, and 2 r (d + o) l FLOPs suffice;
* products with all adapters at once, masked to the row's own, move s (d + o) l numbers at s times the FLOPs: on a CPU,
  whose products with few rows are bound by FLOPs, 3 to 7 times the time of the first at s = 32;
* merging moves d o numbers for each adapter of a batch, and its rows are then multiplied apart.

So factors are gathered, by row and not by token, once for a whole dispatch of many tokens.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from mesh.rules import partition

BLOCK = 32  # tokens of a row multiplied at a time: XLA's CPU backend sums longer ones in another order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAdapted:
    """W + a[row] b[row] in the place of a matrix W, for `project`.

    Attributes:
        weight: [*in, *out].
        a: [rows, in, rank], with the input axes merged.
        b: [rows, rank, out], with the output axes merged; scales are in it.
    """

    weight: jax.Array
    a: jax.Array
    b: jax.Array

    def __getitem__(self, index: Any) -> Self:
        """Return the whole, as a parameter is read by `[...]`; a part of it makes no sense."""
        assert index is ..., "a matrix with low-rank updates is read as a whole"
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape

    def update(self, x: jax.Array, in_axis: str | None, out_axis: str | None) -> jax.Array:
        """Return x a b, [rows, length, out], for x [rows, length, *in]; the axes are logical names of the first ones.

        On CPUs a token's result is the same to the bit whatever the other rows are and however the row was chunked.
        """
        rows, length = x.shape[:2]
        x = jnp.reshape(x, (rows, length, self.a.shape[1]), out_sharding=partition("batch", None, in_axis))

        def multiplied(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            low = jnp.einsum(
                "btd,bdl->btl",
                x,
                a.astype(x.dtype),
                preferred_element_type=jnp.float32,
                out_sharding=partition("batch", None, None),
            )
            spec = partition("batch", None, out_axis)
            return jnp.einsum("btl,blo->bto", low.astype(x.dtype), b.astype(x.dtype), out_sharding=spec)

        def in_blocks(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            if length <= BLOCK or length % BLOCK:
                return multiplied(x, a, b)
            parts = [multiplied(x[:, i : i + BLOCK], a, b) for i in range(0, length, BLOCK)]
            return jnp.concatenate(parts, axis=1)

        return jax.lax.platform_dependent(x, self.a, self.b, cpu=in_blocks, default=multiplied)
