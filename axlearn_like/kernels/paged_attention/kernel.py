"""The kernel of paged attention that an engine uses on TPUs, with its block sizes.

All engines of a run must have the same sizes to draw the same bits.
"""

import dataclasses
from typing import Any, override

import jax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.scope import exact_kernels, refuse_exact
from axlearn_like.kernels.paged_attention.rows import (
    DEFAULT,
    BlockSizes,
    PagedRows,
    RankRows,
    SharedTiles,
    has_wide_heads,
)

_SIZES = tuple(field.name for field in dataclasses.fields(BlockSizes))


class PagedKernel(Configurable):
    """A kernel with its block sizes bound to it. Kernels that compute the same are equal, so programs can be shared."""

    class Config(ConfigBase["PagedKernel"]):
        row_keys: int = DEFAULT.row_keys  # keys of a block, decoding
        row_queries: int = DEFAULT.row_queries  # queries of a block, decoding
        chunk_keys: int = DEFAULT.chunk_keys  # keys of a block, in chunks of prompts
        chunk_queries: int = DEFAULT.chunk_queries
        shared_keys: int = DEFAULT.shared_keys  # keys of a block, in cascade attention
        vmem_mib: int | None = None  # limit of vector memory; None: the compiler's
        self_test: bool = True  # compare it with XLA when an engine starts, and refuse to start where they disagree
        interpret: bool = False  # simulate a TPU, which is slow: for tests

        @override
        def check_fields(self) -> None:
            self.require_least(1, *_SIZES)

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.sizes = BlockSizes(**{name: getattr(cfg, name) for name in _SIZES})

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.sizes, self.cfg.interpret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedKernel) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def described(self) -> dict[str, Any]:
        """Return the sizes as a field of an event."""
        return {"sizes": {name: size for name, size in dataclasses.asdict(self.sizes).items() if size is not None}}

    def attend(self, rows: PagedRows, pool: Any, *, rules: ScoreRules, sinks: bool) -> tuple[jax.Array, Any]:
        """Write new tokens and attend; see `ragged_attention`.

        Pools of int8 and of wide heads have kernels of their own.
        """
        from axlearn_like.kernels.paged_attention.int8 import has_scales  # Pallas: slow to import

        options: dict[str, Any] = {"rules": rules, "sinks": sinks, "sizes": self.sizes}
        if has_scales(pool):
            refuse_exact("attention to pages of int8")
            from axlearn_like.kernels.paged_attention.int8 import int8_attention

            return int8_attention(rows, pool, **options, interpret=self.cfg.interpret)
        if exact_kernels() is not None or has_wide_heads(pool):
            from axlearn_like.kernels.exact.attention import exact_paged_attention

            return exact_paged_attention(rows, pool, rules=rules, sinks=sinks, interpret=self.cfg.interpret)
        from axlearn_like.kernels.paged_attention.ragged import ragged_attention

        return ragged_attention(rows, pool, **options, interpret=self.cfg.interpret)

    def attend_rank_space(
        self, rows: RankRows, pool: jax.Array, factors: Any, *, rules: ScoreRules, sinks: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Write new tokens and attend, with a cache in rank space; see `rank_space_attention`."""
        refuse_exact("attention to a cache in rank space")
        from axlearn_like.kernels.low_rank.attention import rank_space_attention

        options: dict[str, Any] = {"sizes": self.sizes, "interpret": self.cfg.interpret}
        return rank_space_attention(rows, pool, factors, rules=rules, sinks=sinks, **options)

    def attend_shared(
        self, rows: PagedRows, pool: jax.Array, tiles: SharedTiles, *, rules: ScoreRules
    ) -> tuple[jax.Array, jax.Array]:
        """Write new tokens and attend, with keys in common read once a tile; see `cascade_attention`."""
        refuse_exact("attention with keys in common (cascade)")
        from axlearn_like.kernels.paged_attention.cascade import cascade_attention

        return cascade_attention(rows, pool, tiles, rules=rules, sizes=self.sizes, interpret=self.cfg.interpret)
