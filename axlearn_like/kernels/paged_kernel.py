"""The kernel of paged attention that an engine uses on TPUs: which one, and with which block sizes.

Block sizes are those of the config where it has them, else those of the table (`block_sizes.py`), else the defaults.
All engines of a run must have the same to draw the same bits: give sizes where their chips are of several generations.
"""

import dataclasses
from typing import Any, Literal, override

import jax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.block_sizes import BlockKey, BlockSizes, load_table
from mesh.generations import generation_of

LANES = 128  # the width of a TPU register
_SIZES = tuple(field.name for field in dataclasses.fields(BlockSizes))


class PagedKernel(Configurable):
    """A kernel with its block sizes bound to it. Kernels that compute the same are equal, so programs can be shared.

    Attributes:
        sizes: of its blocks.
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
            cfg: of the kernel.
            device: one of those that it runs on.
            kv_heads: key/value heads of one device.
            head_dim: width of a head.
            page_size: tokens of a page.

        Raises:
            UserError: the table is missing or damaged, or a package that the kernel needs is not installed.
        """
        if cfg.name == "batched":
            from axlearn_like.kernels.batched_paged_attention import require_tokamax  # Pallas: slow to import

            require_tokamax()
        self.cfg = cfg
        found = generation_of(device)
        generation = str(device.device_kind).lower() if found is None else found.name
        self.key = BlockKey(generation, kv_heads, -(-head_dim // LANES) * LANES, page_size)
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

    def attend(
        self,
        q_rckqh: jax.Array,
        k_rckh: jax.Array,
        v_rckh: jax.Array,
        pool: Any,
        *,
        page_table_rw: jax.Array,
        starts_r: jax.Array,
        counts_r: jax.Array,
        rules: ScoreRules,
        sinks: bool,
    ) -> tuple[jax.Array, Any]:
        """Write new tokens and attend; see `paged_attention_tpu`. A pool of int8 has a kernel of its own."""
        from axlearn_like.kernels.int8_paged_attention import has_scales, int8_paged_attention_tpu  # Pallas: slow

        numbers: dict[str, Any] = {"page_table_rw": page_table_rw, "starts_r": starts_r, "counts_r": counts_r}
        options: dict[str, Any] = {"rules": rules, "sinks": sinks, "sizes": self.sizes}
        if has_scales(pool):
            options |= {"interpret": self.cfg.interpret}
            return int8_paged_attention_tpu(q_rckqh, k_rckh, v_rckh, pool, **numbers, **options)
        if self.cfg.name == "batched":
            from axlearn_like.kernels.batched_paged_attention import batched_paged_attention_tpu

            return batched_paged_attention_tpu(q_rckqh, k_rckh, v_rckh, pool, **numbers, **options)
        from axlearn_like.kernels.ragged_paged_attention import paged_attention_tpu

        options |= {"interpret": self.cfg.interpret}
        return paged_attention_tpu(q_rckqh, k_rckh, v_rckh, pool, **numbers, **options)

    def attend_shared(
        self,
        q_rckqh: jax.Array,
        k_rckh: jax.Array,
        v_rckh: jax.Array,
        pool: jax.Array,
        *,
        page_table_rw: jax.Array,
        starts_r: jax.Array,
        counts_r: jax.Array,
        shared_t: jax.Array,
        sources_t: jax.Array,
        tile: int,
        rules: ScoreRules,
    ) -> tuple[jax.Array, jax.Array]:
        """Write new tokens and attend, with keys in common read once a tile; see `cascade_attention_tpu`."""
        from axlearn_like.kernels.cascade_attention import cascade_attention_tpu

        return cascade_attention_tpu(
            *(q_rckqh, k_rckh, v_rckh, pool),
            page_table_rw=page_table_rw,
            starts_r=starts_r,
            counts_r=counts_r,
            shared_t=shared_t,
            sources_t=sources_t,
            tile=tile,
            rules=rules,
            sizes=self.sizes,
            interpret=self.cfg.interpret,
        )
