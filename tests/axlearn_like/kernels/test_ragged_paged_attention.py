"""Paged attention on TPU: what it computes (simulated on CPU), and that the TPU compiler takes it in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.block_sizes import BlockSizes
from axlearn_like.kernels.ragged_paged_attention import make_pool, paged_attention_tpu
from mesh import UserError, make_mesh
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

PAGE_SIZE = 4
SIZES = BlockSizes(row_keys=8, row_queries=4, chunk_keys=8, chunk_queries=4)


@dataclasses.dataclass
class Case:
    """Rows of sequences whose first tokens are in the pool already; pages in scrambled order."""

    starts: list[int]
    counts: list[int]
    chunk: int
    kv_heads: int = 2
    per_kv: int = 3
    head_dim: int = 128
    dtype: str = "float32"
    rules: ScoreRules = ScoreRules()

    def __post_init__(self):
        rng = np.random.default_rng(0)
        rows, width = len(self.starts), 5
        self.k, self.v = (self._array(rng, rows, width * PAGE_SIZE, self.kv_heads) for _ in range(2))
        self.q = self._array(rng, rows, self.chunk, self.kv_heads, self.per_kv)
        # Two layers of pages, of which the second is meant; its page 0 stands for what is not in use.
        self.pages = rows * width + 1
        self.table = self.pages + 1 + rng.permutation(rows * width).reshape(rows, width)
        ends = np.array(self.starts) + self.counts
        self.table[np.arange(width) * PAGE_SIZE >= ends[:, None]] = self.pages
        heads = [slice(0, self.head_dim)]
        empty = make_pool(2, self.pages, PAGE_SIZE, self.kv_heads, self.head_dim, self.dtype)
        self.pool = np.asarray(rng.normal(size=empty.shape), empty.dtype)  # of other sequences, to be ignored
        for row, start in enumerate(self.starts):
            for position in range(start):
                slot = self.pool[self.table[row, position // PAGE_SIZE], position % PAGE_SIZE]
                slot[0::2, *heads], slot[1::2, *heads] = self.k[row, position], self.v[row, position]
                slot[:, self.head_dim :] = 0

    def _array(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.normal(size=(*shape, self.head_dim)), self.dtype))

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        taken = np.array(self.starts)[:, None] + np.arange(self.chunk)
        new = [np.take_along_axis(x, taken[..., None, None], axis=1) for x in (self.k, self.v)]

        @jax.jit
        def attend(q, k, v, pool, table, starts, counts):
            return paged_attention_tpu(
                q, k, v, pool, page_table_rw=table, starts_r=starts, counts_r=counts,
                sizes=SIZES, interpret=True, rules=self.rules,
            )  # fmt: skip

        numbers = (np.asarray(x, np.int32) for x in (self.table, self.starts, self.counts))
        mixed, pool = attend(self.q, *new, self.pool, *numbers)
        return np.asarray(mixed), np.asarray(pool)

    def expected(self) -> np.ndarray:
        mixed = np.zeros(self.q.shape, np.float64)
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            for token in range(count):
                seen = slice(max(0, start + token + 1 - (self.rules.window or 99)), start + token + 1)
                k, v = (x[row, seen].astype(np.float64) for x in (self.k, self.v))
                scores = np.einsum("kqh,skh->kqs", self.q[row, token].astype(np.float64), k)
                scores *= self.rules.scale_of(self.head_dim)
                if cap := self.rules.soft_cap:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[row, token] = np.einsum("kqs,skh->kqh", weights / weights.sum(-1, keepdims=True), v)
        return mixed

    def expected_pool(self) -> np.ndarray:
        pool = self.pool.copy()
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            for position in range(start, start + count):
                slot = pool[self.table[row, position // PAGE_SIZE], position % PAGE_SIZE]
                slot[0::2, : self.head_dim], slot[1::2, : self.head_dim] = self.k[row, position], self.v[row, position]
                slot[:, self.head_dim :] = 0
        return pool


CASES = {
    "decoding": Case([0, 5, 7, 16, 3, 1], [1, 1, 1, 1, 0, 1], 1),
    "chunks": Case([0, 3, 8, 4, 11], [9, 9, 4, 0, 2], 9),  # whole pages, parts, an idle row
    "narrow heads": Case([2, 0], [1, 1], 1, kv_heads=1, per_kv=2, head_dim=64),
    "window, cap, scale": Case([0, 5, 7], [4, 1, 4], 4, rules=ScoreRules(window=3, soft_cap=2.0, scale=0.1)),
    "bfloat16": Case([6, 0, 2], [5, 1, 0], 5, dtype="bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_against_plain_attention_in_float64(name):
    case = CASES[name]
    mixed, pool = case.run()
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(mixed.astype(np.float64), case.expected(), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(pool, case.expected_pool())


def test_dead_tokens_are_zero_and_rows_do_not_depend_on_each_other():
    case = CASES["chunks"]
    mixed, _ = case.run()
    dead = np.arange(case.chunk) >= np.array(case.counts)[:, None]
    assert not mixed[dead].any()
    alone = dataclasses.replace(case)
    others = [0, 2, 3, 4]
    alone.counts = [0 if row in others else count for row, count in enumerate(case.counts)]
    np.testing.assert_array_equal(alone.run()[0][1], mixed[1])


def test_heads_spread_over_devices_give_the_same():
    found = elsewhere(two_devices, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
    assert found == {"tensor": True, "data": True}


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "chunk"), [("v5p:2x2x1", 1), ("v6e:2x2", 1), ("v6e:2x2", 64)])
def test_tpu_compiler_updates_the_pool_in_place(topology, chunk):
    """Ahead of time, for chips that are not there: a scan over layers, heads over four devices."""
    found = elsewhere(compile_for_tpu, topology, str(chunk), environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"]
    assert found["temporary"] < 0.05 * found["pool"]


def test_head_counts_that_the_kernel_cannot_lay_out_are_refused():
    with pytest.raises(UserError, match="3 key/value heads per device"):
        make_pool(1, 2, PAGE_SIZE, kv_heads=3, head_dim=128)


def test_page_tables_that_do_not_fit_into_scalar_memory_are_refused():
    rows, width = 256, 2048  # by the compiler's word: 64 rows fit, 128 do not
    shape = jax.ShapeDtypeStruct
    q, kv = shape((rows, 1, 2, 2, 128), jnp.bfloat16), shape((rows, 1, 2, 128), jnp.bfloat16)
    numbers = [shape(x, jnp.int32) for x in ((rows, width), (rows,), (rows,))]

    def attend(q, k, v, pool, table, starts, counts):
        return paged_attention_tpu(q, k, v, pool, page_table_rw=table, starts_r=starts, counts_r=counts)

    with pytest.raises(UserError, match="256 rows x 2048 pages of 4 tokens"):
        jax.eval_shape(attend, q, kv, kv, make_pool(1, 2, PAGE_SIZE, 2, 128), *numbers)


def two_devices() -> dict[str, bool]:
    """Mesh axis -> whether two devices along it compute what one does."""
    case = CASES["decoding"]
    expected = case.run()
    found = {}
    for axis in ("tensor", "data"):
        with jax.set_mesh(make_mesh({axis: 2})):
            found[axis] = all(map(np.array_equal, case.run(), expected))
    return found


def compile_for_tpu(topology: str, chunk: str) -> dict[str, int]:
    """Bytes per device of a program that runs eight layers of attention on one pool."""
    from jax.experimental import topologies

    layers, pages, rows, width, kv_heads, tokens = 8, 512, 16, 64, 8, int(chunk)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    with jax.set_mesh(make_mesh({"tensor": 4}, devices)):
        mesh = jax.sharding.get_mesh()
        heads, whole = jax.NamedSharding(mesh, jax.P(None, None, "tensor")), jax.NamedSharding(mesh, jax.P())

        def run(q, k, v, pool, table, starts, counts):
            def layer(pool, index):
                table_of_layer = table + index * pages
                mixed, pool = paged_attention_tpu(
                    q, k, v, pool, page_table_rw=table_of_layer, starts_r=starts, counts_r=counts
                )
                return pool, mixed

            return jax.lax.scan(layer, pool, jnp.arange(layers))

        def array(*shape, dtype=jnp.bfloat16, sharding=heads):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        pool = jax.eval_shape(lambda: make_pool(layers, pages, 16, kv_heads, 128))
        pool = array(*pool.shape)
        kv, q = array(rows, tokens, kv_heads, 128), array(rows, tokens, kv_heads, 5, 128)
        numbers = [array(*shape, dtype=jnp.int32, sharding=whole) for shape in ((rows, width), (rows,), (rows,))]
        memory = jax.jit(run, donate_argnums=3).lower(q, kv, kv, pool, *numbers).compile().memory_analysis()
    assert memory is not None
    return {
        "pool": pool.size * pool.dtype.itemsize // 4,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
