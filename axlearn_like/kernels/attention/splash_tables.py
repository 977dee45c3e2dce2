"""Tables of splash attention: the blocks of keys that each block of queries visits, and the sizes of these blocks."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from axlearn_like.kernels.attention.context_parallel import zigzag
from axlearn_like.kernels.attention.interface import Layout
from axlearn_like.kernels.attention.shared_prefix import SharedPrefix, SharedPrefixes, shared_prefix_mask

LANES = 128  # the width of a TPU register; blocks are multiples of it


def padded(length: int) -> int:
    """Return the length rounded up to whole registers."""
    return length + -length % LANES


def fitting(block: int, length: int) -> int:
    """Return the largest block size that is at most `block`, a multiple of 128, and divides the length."""
    return max(size for size in range(LANES, min(block, length) + 1, LANES) if length % size == 0)


class Sizes(NamedTuple):
    """Sizes of blocks of queries and keys, and of the keys multiplied at a time; also in the pass of dk and dv."""

    q: int
    kv: int
    compute: int
    kv_dkv: int
    compute_dkv: int
    fused: bool


@jax.tree_util.register_pytree_node_class
class Tables:
    """The blocks of keys that each block of queries visits: for the forward pass, for dq, for dk and dv."""

    def __init__(self, arrays: tuple[Any, Any, Any], function: Any):
        self.arrays, self.function = arrays, function

    def with_codes(self, codes: Any) -> "Tables":
        """Return the tables with other codes of the queries: those of one row."""
        forward, dq, dkv = (info and info._replace(q_sequence=codes) for info in self.arrays)
        return Tables((forward, dq, dkv), self.function)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Return the arrays, and the mask function as static data."""
        return self.arrays, self.function

    @classmethod
    def tree_unflatten(cls, function: Any, arrays: Any) -> "Tables":
        """Return the tables again."""
        return cls(tuple(arrays), function)


@functools.lru_cache(maxsize=64)
def make_tables(
    mask: tuple[str, int | None], shape: tuple[int, int], places: bytes, cp_size: int, sizes: Sizes
) -> Tables:
    """Return tables made by numpy, block by block; all heads share them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    kind, window = mask
    if kind == "full":
        one: Any = masks.FullMask(shape)
    else:
        one = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
        one.q_sequence = np.frombuffer(places, np.int32)
    return _tables_of_mask(one, cp_size, sizes)


@functools.lru_cache(maxsize=64)
def shared_prefix_tables(
    rows: SharedPrefix | SharedPrefixes, length: int, cp_size: int, layout: Layout, sizes: Sizes
) -> Tables:
    """Return tables for rows of prompts and their completions; those of `SharedPrefixes` lack the codes of a row."""
    places = zigzag.order(length, cp_size, layout)
    if isinstance(rows, SharedPrefix):
        return _tables_of_mask(shared_prefix_mask(rows, places), cp_size, sizes)
    # The blocks that a row needs are known with its codes only, so all causal ones are visited, and masked.
    forward, dq, dkv = make_tables(("causal", None), (length, length), places.tobytes(), cp_size, sizes).arrays
    return Tables((_masked(forward), dq and _masked(dq), _masked(dkv)), rows.visible)


def _masked(info: Any) -> Any:
    """Return a table in which no block is taken for complete."""
    return info._replace(block_mask=np.minimum(info.block_mask, 1))


def _tables_of_mask(one: Any, cp_size: int, sizes: Sizes) -> Tables:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    of_heads, shards = masks.MultiHeadMask([one]), {"head_shards": 1, "q_seq_shards": cp_size}
    forward, function = info.process_mask(of_heads, (sizes.q, sizes.kv), **shards)
    blocks = (sizes.q, sizes.kv_dkv)
    dkv, _ = info.process_mask_dkv(of_heads, blocks, **shards, shrink_grid=not sizes.fused)
    return Tables((forward, None if sizes.fused else forward, dkv), function)


def tables_of_array(visible: jax.Array, sizes: Sizes) -> Tables:
    """Return tables of a mask that is known when the program runs, bool [t, s]: blocks without a pair are skipped."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    forward, _ = info.process_dynamic_mask(visible[None], (sizes.q, sizes.kv))
    dkv, _ = info.process_dynamic_mask_dkv(visible[None], (sizes.q, sizes.kv_dkv))
    return Tables((forward, None if sizes.fused else forward, dkv), None)
