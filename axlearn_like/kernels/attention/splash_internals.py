"""Private parts of jax's splash attention, and all that the stack uses of them.

`tests/test_private_calls.py` fails if another file uses such a name, or if the installed jax is none of `CHECKED`.
"""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

PACKAGE, CHECKED = "jax", ">=0.11.2,<0.13"


def backward(
    arrays: tuple[Any, Any, Any, Any],
    softmax: tuple[jax.Array, jax.Array],
    d_out: jax.Array,
    tables: tuple[Any, Any],
    arguments: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return gradients of queries, keys and values by the kernel's own backward pass.

    Args:
        arrays: queries [heads, t, width], keys and values [heads, s, width], segment ids.
        softmax: mixed values [heads, t, width] and logarithmic sums [heads, t] over all keys, of which `arrays` may
            have a block.
        tables: mask tables for dq, and for dk and dv.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    residuals = (*arrays, None, *softmax, *tables)
    return splash._splash_attention_bwd(res=residuals, do=d_out, **arguments)[3:6]


def computed_mask(
    codes_q: np.ndarray,
    length: int,
    visible: Callable[[Any, Any], Any],
    uniform: Callable[[np.ndarray, int, int], bool | None],
) -> Any:
    """Return a mask [queries, length] that the kernel computes itself.

    Blocks that are uniform are recognised without computing them: a row of 70,000 tokens has 5,000,000,000 pairs.

    Args:
        codes_q: code of each query, int32.
        visible: returns the pairs that count, for codes of queries and indices of keys.
        uniform: returns what all pairs of these queries with keys from the first to the last are; None: they differ.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class ComputedMask(masks._ComputableMask):
        def __init__(self) -> None:
            super().__init__((len(codes_q), length), visible)
            self.q_sequence = codes_q

        def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
            queries, keys = self.q_sequence[idx[0]], idx[1]
            alike = uniform(queries, keys.start, keys.stop - 1)
            if alike is not None:  # the kernel's tables only take any() and all() of it
                return np.full((1, 1), alike)
            return visible(queries[:, None], np.arange(keys.start, keys.stop, dtype=np.int32)[None])

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    return ComputedMask()
