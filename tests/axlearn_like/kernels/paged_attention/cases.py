"""Rows on scrambled pages, and attention to them in float64: what the tests of all kernels of paged attention share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.rows import PagedRows
from mesh import make_mesh

PAGE, TABLE = 4, 6


def attention(q_kqh: np.ndarray, k_skh: np.ndarray, v_skh: np.ndarray, rules: ScoreRules) -> np.ndarray:
    """Return attention in float64 of the last of these tokens to all of them, [k, q, h]."""
    seen = slice(max(0, len(k_skh) - (rules.window or len(k_skh))), None)
    q, k, v = (x.astype(np.float64) for x in (q_kqh, k_skh[seen], v_skh[seen]))
    scores = np.einsum("kqh,skh->kqs", q, k) * rules.scale_of(q.shape[-1])
    if cap := rules.soft_cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kqs,skh->kqh", weights / weights.sum(-1, keepdims=True), v)


@dataclasses.dataclass
class Case:
    """Rows of sequences whose first tokens are in the pool already; pages in scrambled order.

    Keys in common: `shared` of each tile of rows, those of the tile's first one.
    """

    starts: list[int]
    counts: list[int]
    chunk: int
    kv_heads: int = 2
    per_kv: int = 3
    head_dim: int = 128
    dtype: str = "float32"
    rules: ScoreRules = ScoreRules()
    shared: list[int] = dataclasses.field(default_factory=list)
    tile: int = 1

    def __post_init__(self):
        rng, rows = np.random.default_rng(0), len(self.starts)
        self.k, self.v = (self._array(rng, rows, TABLE * PAGE, self.kv_heads) for _ in range(2))
        self.q = self._array(rng, rows, self.chunk, self.kv_heads, self.per_kv)
        # Two layers of pages, of which the second is meant; its page 0 stands for what is not in use.
        self.pages = rows * TABLE + 1
        self.table = self.pages + 1 + rng.permutation(rows * TABLE).reshape(rows, TABLE)
        for tile, keys in enumerate(self.shared):
            for x in (self.k, self.v):
                x[tile * self.tile : (tile + 1) * self.tile, :keys] = x[tile * self.tile, :keys]
        self.table[np.arange(TABLE) * PAGE >= self.ends[:, None]] = self.pages
        self.pool = self.empty_pool(rng)
        for row, start in enumerate(self.starts):
            self.put(self.pool, row, range(start))

    def _array(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return np.array(jnp.asarray(rng.normal(size=(*shape, self.head_dim)), self.dtype))

    @property
    def ends(self) -> np.ndarray:
        return np.array(self.starts) + self.counts

    def empty_pool(self, rng: np.random.Generator) -> Any:
        """Return a pool with numbers of other sequences, to be ignored."""
        from axlearn_like.kernels.paged_attention.pages import make_pool

        empty = make_pool(2, self.pages, PAGE, self.kv_heads, self.head_dim, self.dtype)
        return np.asarray(rng.normal(size=empty.shape), empty.dtype)

    def put(self, pool: Any, row: int, tokens: range) -> None:
        """Write tokens of a row into its pages."""
        put_lines(pool, self.table[row], tokens, self.k[row], self.v[row])

    def rows(self) -> PagedRows:
        taken = np.array(self.starts)[:, None] + np.arange(self.chunk)
        new = [np.take_along_axis(x, taken[..., None, None], axis=1) for x in (self.k, self.v)]
        numbers = (np.asarray(x, np.int32) for x in (self.table, self.starts, self.counts))
        return PagedRows(*(jnp.asarray(x) for x in (self.q, *new, *numbers)))

    def run(self, kernel: Callable[..., Any], **options: Any) -> tuple[np.ndarray, Any]:
        """Return the mixed values and the pool of a kernel, simulated."""

        @jax.jit
        def attend(rows: PagedRows, pool: Any) -> Any:
            return kernel(rows, pool, rules=self.rules, interpret=True, **options)

        return jax.tree.map(np.asarray, attend(self.rows(), self.pool))

    def held(self, x: np.ndarray) -> np.ndarray:
        """Return keys or values as the pages hold them."""
        return x

    def expected(self) -> np.ndarray:
        mixed, (k, v) = np.zeros(self.q.shape, np.float64), (self.held(x) for x in (self.k, self.v))
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            for token in range(count):
                end = start + token + 1
                mixed[row, token] = attention(self.q[row, token], k[row, :end], v[row, :end], self.rules)
        return mixed

    def expected_pool(self) -> Any:
        pool = jax.tree.map(np.copy, self.pool)
        for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            self.put(pool, row, range(start, end))
        return pool

    def check(self, mixed: np.ndarray, pool: Any, tolerance: float) -> None:
        """Compare the mixed values with those in float64, and the pool to the bit."""
        tolerance = 2e-2 if self.dtype == "bfloat16" else tolerance
        np.testing.assert_allclose(mixed.astype(np.float64), self.expected(), rtol=tolerance, atol=tolerance)
        jax.tree.map(np.testing.assert_array_equal, pool, self.expected_pool())


def put_lines(pool: np.ndarray, table: np.ndarray, tokens: range, k: np.ndarray, v: np.ndarray) -> None:
    """Write keys and values of one row's tokens into its pages; lanes behind a narrow head are zero."""
    for position in tokens:
        slot = pool[table[position // PAGE], position % PAGE]
        slot[:] = 0
        slot[0::2, : k.shape[-1]], slot[1::2, : k.shape[-1]] = k[position], v[position]


def compiled_bytes(
    attend: Callable[..., Any],
    make_pool: Callable[[int], Any],
    topology: str,
    *,
    queries: tuple[int, int, int, int],
    table: int,
    pages: int,
    layers: int = 8,
    chips: int = 4,
    tiles: int = 0,
    width: int = 128,
) -> dict[str, int]:
    """Return bytes per device of a program that runs layers of attention on one pool, heads over the devices.

    Ahead of time, for chips that are not there.

    Args:
        attend: attention, given rows, the pool and, with tiles, shared keys and their sources.
        make_pool: makes a pool of so many pages.
        topology: topology of the chips.
        queries: rows, tokens of each, key/value heads, query heads of each.
        table: pages of a row's table.
        pages: pages of a layer.
        layers: layers of the scan.
        chips: chips of the topology that are used.
        tiles: tiles of rows that share keys; 0: none do.
        width: numbers of a head.
    """
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:chips]
    with jax.set_mesh(make_mesh({"tensor": chips}, devices)):
        mesh = jax.sharding.get_mesh()

        def array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16, axis: int | None = None) -> Any:
            spec = jax.P() if axis is None else jax.P(*[None] * axis, "tensor")
            return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

        def run(rows: PagedRows, pool: Any, *shared: Any) -> Any:
            def layer(pool: Any, index: Any) -> Any:
                mixed, pool = attend(rows._replace(page_table_rw=rows.page_table_rw + index * pages), pool, *shared)
                return pool, mixed

            return jax.lax.scan(layer, pool, jnp.arange(layers))

        pool = jax.eval_shape(lambda: make_pool(layers * pages))
        pool = jax.tree.map(lambda x: array(x.shape, x.dtype, x.ndim - 2), pool)
        kv, count = array((*queries[:3], width), axis=2), queries[0]
        numbers = [array(x, jnp.int32) for x in ((count, table), (count,), (count,), (tiles,), (tiles,))]
        rows = PagedRows(array((*queries, width), axis=2), kv, kv, *numbers[:3])
        memory = (
            jax.jit(run, donate_argnums=1)
            .lower(rows, pool, *(numbers[3:] if tiles else ()))
            .compile()
            .memory_analysis()
        )
    assert memory is not None
    return {
        "pool": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool)) // chips,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
