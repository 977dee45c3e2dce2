"""New tokens of rows and the pages of their sequences: what every kernel of paged attention is given.

Shape letters of this folder: r rows, c tokens of a row, k key/value heads, q query heads per key/value head, h head
width, w the widest page table.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.interface import ScoreRules
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition

PLAIN = ScoreRules()
LANES = 128  # the width of a TPU register: narrower heads are padded to it
TABLE_BYTES = 15 << 16  # limit of a page table: it is stored in scalar memory, 1 MiB on all TPUs, with little else


class PagedRows(NamedTuple):
    """New tokens of rows, and the pages of their sequences.

    A row is a chunk of one sequence, right-padded. No two rows may write to the same page.
    """

    q_rckqh: jax.Array  # queries, rotated; the type of the pool
    k_rckh: jax.Array  # keys, rotated
    v_rckh: jax.Array  # values
    # int32, the index in the pool (the layer's offset included) of each page of a row's sequence. Unused entries may be
    # any page; it is read and ignored, so use the layer's page 0.
    page_table_rw: jax.Array
    starts_r: jax.Array  # int32, tokens of the sequence already in its pages: the position of the row's first token
    counts_r: jax.Array  # int32, live tokens of the row; 0 for an idle one

    def zero_padding(self, mixed_rckqh: jax.Array) -> jax.Array:
        """Return mixed values with zeros where there is no live token."""
        live = jnp.arange(mixed_rckqh.shape[1]) < self.counts_r[:, None]
        return jnp.where(live[:, :, None, None, None], mixed_rckqh, 0)


class RankRows(NamedTuple):
    """New tokens of rows as `PagedRows`, with keys and values in rank space (l)."""

    q_rckqh: jax.Array
    k_rcl: jax.Array
    v_rcl: jax.Array
    page_table_rw: jax.Array
    starts_r: jax.Array
    counts_r: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedTiles:
    """Keys that rows have in common, by tiles of rows that follow one another (t)."""

    shared_t: Any  # int32, keys that the rows of a tile have in common, multiples of the page size
    sources_t: Any  # int32, the row whose pages hold them
    rows: int = dataclasses.field(metadata={"static": True})  # rows of a tile; the last may have fewer


def on_own_heads[P](
    body: Callable[..., tuple[jax.Array, P]], rows: PagedRows, pool: P, *numbers: Any
) -> tuple[jax.Array, P]:
    """Return a body's mixed values and pool, computed under a mesh by every device for its own heads and all rows.

    `pool`: arrays whose heads, or lines of heads, are their last axis but one. `numbers`: pytrees of integers, of all
    devices.
    """
    args = (rows, pool, *numbers)
    if jax.sharding.get_abstract_mesh().empty:
        return body(*args)

    def of_heads(x: jax.Array) -> Any:
        return partition(*[None] * (x.ndim - 2), "heads", None)  # the pool is sharded as keys are

    def whole(x: jax.Array) -> Any:
        return partition(*[None] * x.ndim)

    queries: Any = partition(None, None, "heads", None, None)
    new = PagedRows(queries, of_heads(rows.k_rckh), of_heads(rows.v_rckh), *map(whole, rows[3:]))
    specs = (new, jax.tree.map(of_heads, pool), *jax.tree.map(whole, numbers))
    # Rows are gathered on every device: pages are not sharded over the axes that shard a batch.
    args = jax.tree.map(jax.sharding.reshard, args, specs)
    mixed, pool = jax.shard_map(body, in_specs=specs, out_specs=(queries, specs[1]), check_vma=False)(*args)
    return constrain(mixed, "batch", None, "heads", None, None), pool


def padded(head_dim: int) -> int:
    """Return the width of a head in the pool."""
    return -(-head_dim // LANES) * LANES


def has_wide_heads(pool: jax.Array) -> bool:
    """Return True if heads of a device lie side by side and are wider than a register, which JAX's kernel cannot read.

    It reads one head's lines of a block with a stride, and strided reads have 128 lanes (`strided_load_kv` says so).
    """
    shards = math.prod(axis_sizes("heads").values())
    return pool.shape[-1] > LANES and pool.shape[-2] > 2 * shards


def widen(x: jax.Array) -> jax.Array:
    """Return x padded with zeros to the width of a head in the pool."""
    missing = padded(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def check_rules(rules: ScoreRules, sinks: bool) -> None:
    """Refuse rules that the kernels do not support (UserError: sinks or attention that is not causal)."""
    if sinks:
        raise UserError(
            "Attention.sinks: the TPU kernel of paged attention does not support sinks; expected sinks=False"
        )
    if not rules.causal:
        raise UserError("Attention.causal=False is not supported with a cache; expected causal attention")


def check_table(rows: PagedRows, page_size: int) -> None:
    """Refuse a page table that does not fit into scalar memory (UserError)."""
    count, width = rows.page_table_rw.shape
    size = count * (width + -width % LANES) * 4
    if size > TABLE_BYTES:
        pages = TABLE_BYTES // (count * LANES * 4) * LANES
        raise UserError(
            f"paged attention: a table of {count} rows x {width} pages of {page_size} tokens takes {size} bytes of the "
            f"TPU's scalar memory; expected at most {TABLE_BYTES}: {pages} pages a row, or fewer rows, or larger pages"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of blocks, in tokens. They change the last bits of results."""

    row_keys: int = 512  # keys of the cache that are fetched and attended to at once, decoding
    row_queries: int = 8  # queries (of all rows together) of a step of the kernel, decoding
    chunk_keys: int = 512  # the same as `row_keys`, in chunks of a prompt
    chunk_queries: int = 64  # the same as `row_queries`, in chunks of a prompt
    shared_keys: int = 512  # the same as `row_keys`, in cascade attention
    vmem_mib: int | None = None  # limit of a kernel's vector memory; None: the compiler's own

    @property
    def vmem_bytes(self) -> int | None:
        """The limit of vector memory in bytes."""
        return None if self.vmem_mib is None else self.vmem_mib << 20


DEFAULT = BlockSizes()
