"""Candidates of block sizes of paged attention: a job, the sizes that are tried on it, the programs that use them."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.block_sizes import BlockSizes
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.pages import make_pool
from axlearn_like.kernels.paged_attention.rows import PagedRows, SharedTiles

TILE = 16  # rows that share keys
# What is tuned together, and the sizes that are tried: of rows with one token, of chunks, of shared keys.
PHASES: Mapping[str, Mapping[str, Sequence[int]]] = MappingProxyType(
    {
        "rows": {"row_keys": (128, 256, 512, 1024, 2048), "row_queries": (8, 16, 32)},
        "chunks": {"chunk_keys": (256, 512, 1024, 2048), "chunk_queries": (32, 64, 128, 256)},
        "shared": {"shared_keys": (128, 256, 512, 1024, 2048)},
    }
)
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Job:
    """Attention of one device.

    Attributes:
        kv_heads: key/value heads.
        per_kv: query heads of each.
        head_dim: their width.
        page_size: tokens of a page.
        rows: sequences that decode.
        keys: tokens of each.
        chunk: tokens of a chunk of a prompt, in as many rows as make 512.
        vmem_mib: limit of vector memory; None: the compiler's.
        interpret: simulate a TPU.
    """

    kv_heads: int = 8
    per_kv: int = 4
    head_dim: int = 128
    page_size: int = 16
    rows: int = 64
    keys: int = 4096
    chunk: int = 128
    vmem_mib: int | None = None
    interpret: bool = False

    def kernel(self, sizes: Sizes) -> PagedKernel:
        """Return the kernel with these sizes, the others by default."""
        return PagedKernel.Config(interpret=self.interpret, vmem_mib=self.vmem_mib).set(**sizes).build()


def candidates(phase: str, most: int) -> list[Sizes]:
    """Return the sizes of a phase that are tried, the default first; `most`: keys of a row, which no block exceeds."""
    default, grid = dataclasses.asdict(BlockSizes()), PHASES[phase]
    first = {name: default[name] for name in grid}
    others = [dict(zip(grid, each, strict=True)) for each in itertools.product(*grid.values())]
    keys = next(iter(grid))
    return [first, *(one for one in others if one != first and one[keys] <= most)]


def program(job: Job, phase: str, kernel: PagedKernel) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a call of the kernel, of which the second argument may be donated, and its arguments, described."""
    chunk = job.chunk if phase == "chunks" else 1
    count, pages = (max(1, 512 // chunk) if phase == "chunks" else job.rows), -(-job.keys // job.page_size)
    tiles = -(-count // TILE)
    pool = jax.eval_shape(lambda: make_pool(1, 1 + count * pages, job.page_size, job.kv_heads, job.head_dim))
    kv: Any = jax.ShapeDtypeStruct((count, chunk, job.kv_heads, job.head_dim), jnp.bfloat16)
    q: Any = jax.ShapeDtypeStruct((*kv.shape[:3], job.per_kv, job.head_dim), jnp.bfloat16)
    shapes = [(count, pages), (count,), (count,), *([(tiles,)] * 2 if phase == "shared" else ())]
    numbers: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    rows = PagedRows(q, kv, kv, *numbers[:3])

    def attend(rows: PagedRows, pool: Any, *shared: Any) -> Any:
        if not shared:
            return kernel.attend(rows, pool, rules=ScoreRules(), sinks=False)
        shared_t, sources_t = shared
        return kernel.attend_shared(rows, pool, SharedTiles(shared_t, sources_t, TILE), rules=ScoreRules())

    return attend, (rows, pool, *numbers[3:])
