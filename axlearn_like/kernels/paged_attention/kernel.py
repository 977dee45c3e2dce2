"""The kernel of paged attention that an engine uses on TPUs: which one, and with which block sizes.

Block sizes are those of the config where it has them, else those of the table (`block_sizes.py`), else the defaults.
All engines of a run must have the same to draw the same bits: give sizes where their chips are of several generations.
"""

import dataclasses
from typing import Any, Literal, override

import jax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.exact.scope import exact_kernels, refuse_exact
from axlearn_like.kernels.paged_attention.block_sizes import BlockKey, BlockSizes, load_table
from axlearn_like.kernels.paged_attention.rows import PagedRows, RankRows, SharedTiles, padded
from mesh.generations import generation_of

_SIZES = tuple(field.name for field in dataclasses.fields(BlockSizes))


class PagedKernel(Configurable):
    """A kernel with its block sizes bound to it. Kernels that compute the same are equal, so programs can be shared.

    Attributes:
        sizes: sizes of its blocks.
        source: where those that the config does not give come from: "table" or "default".
    """

    class Config(ConfigBase["PagedKernel"]):
        name: Literal["ragged", "batched"] = "ragged"  # ragged paged attention: of JAX, or tokamax's of several rows
        row_keys: int | None = None  # keys of a block, decoding; None: by the table
        row_queries: int | None = None  # queries of a block, decoding
        chunk_keys: int | None = None  # keys of a block, in chunks of prompts
        chunk_queries: int | None = None
        shared_keys: int | None = None  # keys of a block, in cascade attention
        vmem_mib: int | None = None  # limit of vector memory; None: by the table
        table: str | None = None  # a file that `axl bench block_sizes` has written; None: the package's table
        self_test: bool = True  # compare it with XLA when an engine starts, and refuse to start where they disagree
        interpret: bool = False  # simulate a TPU, which is slow: for tests

        @override
        def check_fields(self) -> None:
            """Refuse sizes below 1, and a kernel that nothing has checked."""
            self.require_least(1, *_SIZES)
            batched = self.name == "batched"
            self.require("self_test", self.self_test or not batched, 'True with "batched", which only a chip can check')
            self.require(
                "interpret", not (self.interpret and batched), 'False with "batched", which runs on TPUs alone'
            )

    def __init__(self, cfg: Config, *, device: Any, kv_heads: int, head_dim: int, page_size: int):
        """Choose the sizes.

        Args:
            cfg: config of the kernel.
            device: one of those that it runs on.
            kv_heads: key/value heads of one device.
            head_dim: width of a head.
            page_size: tokens of a page.

        Raises:
            UserError: the table is missing or damaged, or a package that the kernel needs is not installed.
        """
        if cfg.name == "batched":
            from axlearn_like.kernels.paged_attention.batched import require_tokamax  # Pallas: slow to import

            require_tokamax()
        self.cfg = cfg
        found = generation_of(device)
        generation = str(device.device_kind).lower() if found is None else found.name
        self.key = BlockKey(generation, kv_heads, padded(head_dim), page_size)
        sizes, self.source = load_table(cfg.table).find(self.key)
        own = {name: getattr(cfg, name) for name in _SIZES if getattr(cfg, name) is not None}
        self.sizes = dataclasses.replace(sizes, **own)
        self.own = tuple(own)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.cfg.name, self.sizes, self.cfg.interpret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedKernel) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __str__(self) -> str:
        return f"{self.cfg.name} paged attention for {self.key}"

    def described(self) -> dict[str, Any]:
        """Return the choice as fields of an event."""
        sizes = {name: size for name, size in dataclasses.asdict(self.sizes).items() if size is not None}
        return {"kernel": self.cfg.name, "for": str(self.key), "sizes": sizes, "source": self.source, "own": self.own}

    def attend(self, rows: PagedRows, pool: Any, *, rules: ScoreRules, sinks: bool) -> tuple[jax.Array, Any]:
        """Write new tokens and attend; see `ragged_attention`. A pool of int8 has a kernel of its own."""
        from axlearn_like.kernels.paged_attention.int8_scales import has_scales  # Pallas: slow to import

        options: dict[str, Any] = {"rules": rules, "sinks": sinks, "sizes": self.sizes}
        if has_scales(pool):
            refuse_exact("attention to pages of int8")
            from axlearn_like.kernels.paged_attention.int8 import int8_attention

            return int8_attention(rows, pool, **options, interpret=self.cfg.interpret)
        if exact_kernels() is not None:
            from axlearn_like.kernels.exact.attention import exact_paged_attention

            return exact_paged_attention(rows, pool, rules=rules, sinks=sinks, interpret=self.cfg.interpret)
        if self.cfg.name == "batched":
            from axlearn_like.kernels.paged_attention.batched import batched_attention

            return batched_attention(rows, pool, **options)
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
