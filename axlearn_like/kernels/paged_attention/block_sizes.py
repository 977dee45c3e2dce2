"""Block sizes of the kernels of paged attention. What is fastest differs by a half and more between chips and shapes.

Sizes other than these are fields of an engine's config.
"""

import dataclasses


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
