"""The pass over the words of a head by XLA, as a scan over tiles: logits of one tile exist at a time.

Shape letters: as in sums.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.policy_head.sums import HeadRules, Sums, d_products
from mesh.manual import vary, varying


def forward(
    rules: HeadRules, x: jax.Array, weight: jax.Array, targets: jax.Array, reference: Any
) -> tuple[Sums, jax.Array | None]:
    """Return the sums over all words, and the reference's log-sum-exps [n, 1] if there is one."""

    def add(carry: Any, start: Any, size: int) -> Any:
        sums, others = carry
        _, names, logits = _tile(rules, x, weight, start, size)
        logits_of_other = None
        if reference is not None:
            _, _, logits_of_other = _tile(rules, reference[0], reference[1], start, size)
            others = others.add(logits_of_other, jnp.zeros_like(logits, bool))
        return sums.add(logits, names == targets[:, None], logits_of_other), others

    empty = jax.tree.map(lambda part: vary(part, varying(x)), Sums.empty((len(x), 1)))
    sums, others = _over_tiles(add, (empty, empty), weight.shape[1], rules.tile)
    return sums, None if reference is None else others.peak + jnp.log(others.total)


def backward(
    rules: HeadRules,
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    reference: Any,
    normaliser: jax.Array | None,
    columns: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of hidden states and head; `columns` [n, 1]: the statistics, and their cotangents."""

    def add(carry: Any, start: Any, size: int) -> Any:
        d_x, d_weight = carry
        head, names, logits = _tile(rules, x, weight, start, size)
        logprobs = None if reference is None else _tile(rules, reference[0], reference[1], start, size)[2] - normaliser
        d = d_products(logits, names == targets[:, None], columns, rules, logprobs).astype(x.dtype)
        d_x = d_x + jax.lax.dot_general(d, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        d_head = jax.lax.dot_general(x, d, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return d_x, jax.lax.dynamic_update_slice_in_dim(d_weight, d_head.astype(d_weight.dtype), start, axis=1)

    begin = vary(jnp.zeros(x.shape, jnp.float32), varying(x)), vary(jnp.zeros_like(weight), varying(x))
    d_x, d_weight = _over_tiles(add, begin, weight.shape[1], rules.tile)
    return d_x.astype(x.dtype), d_weight


def _over_tiles(add: Callable[[Any, Any, int], Any], begin: Any, words: int, tile: int) -> Any:
    """Return `add(carry, start, words of the tile)` over all tiles; the last has what is left: nothing is padded."""
    count, rest = divmod(words, tile)
    carry, _ = jax.lax.scan(lambda carry, start: (add(carry, start, tile), None), begin, jnp.arange(count) * tile)
    return add(carry, count * tile, rest) if rest else carry


def _tile(rules: HeadRules, x: jax.Array, weight: jax.Array, start: Any, size: int) -> Any:
    """Return the columns of a tile, its words [1, w], and scaled logits [n, w]."""
    columns = jax.lax.dynamic_slice_in_dim(weight, start, size, axis=1)
    logits = rules.logits(jnp.dot(x, columns, preferred_element_type=jnp.float32))
    return columns, start + jnp.arange(size)[None], logits
