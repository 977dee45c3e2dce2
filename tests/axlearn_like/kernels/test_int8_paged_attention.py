"""Paged attention over int8 on TPU: what it computes (simulated on CPU), and that the TPU compiler takes it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.block_sizes import BlockSizes
from axlearn_like.kernels.int8_heads import restore, round_heads
from axlearn_like.kernels.int8_paged_attention import int8_paged_attention_tpu, make_int8_kernel_pool
from mesh import UserError, make_mesh
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

PAGE, TABLE = 4, 5
SIZES = BlockSizes(row_keys=2 * PAGE, chunk_keys=2 * PAGE)


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
        rows = len(self.starts)
        self.k, self.v = (self._array(rng, rows, TABLE * PAGE, self.kv_heads) for _ in range(2))
        self.q = self._array(rng, rows, self.chunk, self.kv_heads, self.per_kv)
        # Two layers of pages, of which the second is meant; its page 0 stands for what is not in use.
        self.pages = rows * TABLE + 1
        self.table = self.pages + 1 + rng.permutation(rows * TABLE).reshape(rows, TABLE)
        ends = np.array(self.starts) + self.counts
        self.table[np.arange(TABLE) * PAGE >= ends[:, None]] = self.pages
        empty = make_int8_kernel_pool(2, self.pages, PAGE, self.kv_heads, self.head_dim)
        numbers = rng.integers(-127, 128, empty["numbers"].shape).astype(np.int8)  # of other sequences, to be ignored
        self.pool = {"numbers": numbers, "scales": np.full(empty["scales"].shape, np.nan, np.float32)}
        for row, start in enumerate(self.starts):
            self.put(self.pool, row, 0, start)

    def _array(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.normal(size=(*shape, self.head_dim)), self.dtype))

    def put(self, pool: dict[str, np.ndarray], row: int, start: int, end: int) -> None:
        """Write tokens of a row into its pages."""
        k, v = (jax.tree.map(np.asarray, round_heads(jnp.asarray(x[row]))) for x in (self.k, self.v))
        for position in range(start, end):
            page, slot = self.table[row, position // PAGE], position % PAGE
            lines, scales = pool["numbers"][page, slot], pool["scales"][page]
            lines[:] = 0
            lines[0::2, : self.head_dim], lines[1::2, : self.head_dim] = k.numbers[position], v.numbers[position]
            scales[:, slot], scales[:, PAGE + slot] = k.scales[position, :, 0], v.scales[position, :, 0]

    def run(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        taken = np.array(self.starts)[:, None] + np.arange(self.chunk)
        new = [np.take_along_axis(x, taken[..., None, None], axis=1) for x in (self.k, self.v)]

        @jax.jit
        def attend(q: Any, k: Any, v: Any, pool: Any, table: Any, starts: Any, counts: Any) -> Any:
            return int8_paged_attention_tpu(
                q, k, v, pool, page_table_rw=table, starts_r=starts, counts_r=counts,
                sizes=SIZES, queries_per_item=12, interpret=True, rules=self.rules,
            )  # fmt: skip

        numbers = (np.asarray(x, np.int32) for x in (self.table, self.starts, self.counts))
        return jax.tree.map(np.asarray, attend(self.q, *new, self.pool, *numbers))

    def expected(self) -> np.ndarray:
        mixed = np.zeros(self.q.shape, np.float64)
        held = [np.asarray(restore(*round_heads(jnp.asarray(x)), "float32"), np.float64) for x in (self.k, self.v)]
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            for token in range(count):
                seen = slice(max(0, start + token + 1 - (self.rules.window or 99)), start + token + 1)
                k, v = (x[row, seen] for x in held)
                scores = np.einsum("kqh,skh->kqs", self.q[row, token].astype(np.float64), k)
                scores *= self.rules.scale_of(self.head_dim)
                if cap := self.rules.soft_cap:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[row, token] = np.einsum("kqs,skh->kqh", weights / weights.sum(-1, keepdims=True), v)
        return mixed

    def expected_pool(self) -> dict[str, np.ndarray]:
        pool = {name: x.copy() for name, x in self.pool.items()}
        for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            self.put(pool, row, start, start + count)
        return pool


CASES = {
    "decoding": Case([0, 5, 7, 16, 3, 1], [1, 1, 1, 1, 0, 1], 1),
    "chunks": Case([0, 3, 8, 4, 11], [9, 9, 4, 0, 2], 9),  # whole pages, parts, an idle row; three items a row
    "narrow heads": Case([2, 0], [1, 1], 1, kv_heads=4, per_kv=2, head_dim=64),
    "window, cap, scale": Case([0, 5, 7, 13], [4, 1, 4, 4], 4, rules=ScoreRules(window=3, soft_cap=2.0, scale=0.1)),
    "bfloat16": Case([6, 0, 2], [5, 1, 0], 5, dtype="bfloat16"),
}
DEFAULT = ("chunks",)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (one not in DEFAULT)) for one in CASES])
def test_against_attention_to_the_rounded_keys_and_values_in_float64(name: str):
    case = CASES[name]
    mixed, pool = case.run()
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
    np.testing.assert_allclose(mixed.astype(np.float64), case.expected(), rtol=tolerance, atol=tolerance)
    expected = case.expected_pool()
    np.testing.assert_array_equal(pool["numbers"], expected["numbers"])
    np.testing.assert_array_equal(pool["scales"], expected["scales"])


def test_head_counts_that_the_kernel_cannot_lay_out_are_refused():
    with pytest.raises(UserError, match=r"1 key/value heads per device in int8; expected 2, 4, 8"):
        make_int8_kernel_pool(1, 2, PAGE, kv_heads=1, head_dim=128)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "chunk"), [("v5p:2x2x1", 1), ("v6e:2x2", 1), ("v6e:2x2", 256), ("v5e:2x2", 1)])
def test_tpu_compiler_updates_the_pool_in_place(topology: str, chunk: int):
    """Ahead of time, for chips that are not there: a scan over layers, heads over four devices."""
    found = elsewhere(compile_for_tpu, topology, str(chunk), environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"] < 0.52 * found["bfloat16"]
    assert found["temporary"] < 0.1 * found["pool"]


def compile_for_tpu(topology: str, chunk: str) -> dict[str, int]:
    """Bytes per device of a program that runs eight layers of attention on one pool."""
    from jax.experimental import topologies

    layers, pages, rows, width, kv_heads, tokens, page = 8, 512, 16, 32, 8, int(chunk), 64
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    with jax.set_mesh(make_mesh({"tensor": 4}, devices)):
        mesh = jax.sharding.get_mesh()
        whole = jax.NamedSharding(mesh, jax.P())

        def run(q: Any, k: Any, v: Any, pool: Any, table: Any, starts: Any, counts: Any) -> Any:
            def layer(pool: Any, index: Any) -> Any:
                of_layer = table + index * pages
                mixed, pool = int8_paged_attention_tpu(
                    q, k, v, pool, page_table_rw=of_layer, starts_r=starts, counts_r=counts
                )
                return pool, mixed

            return jax.lax.scan(layer, pool, jnp.arange(layers))

        def array(*shape: int, axis: int = 2, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
            sharding = jax.NamedSharding(mesh, jax.P(*[None] * axis, "tensor"))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        pool = jax.eval_shape(lambda: make_int8_kernel_pool(layers, pages, page, kv_heads, 128))
        pool = {name: array(*x.shape, axis=x.ndim - 2, dtype=x.dtype) for name, x in pool.items()}
        kv, q = array(rows, tokens, kv_heads, 128), array(rows, tokens, kv_heads, 4, 128)
        numbers = [jax.ShapeDtypeStruct(s, jnp.int32, sharding=whole) for s in ((rows, width), (rows,), (rows,))]
        memory = jax.jit(run, donate_argnums=3).lower(q, kv, kv, pool, *numbers).compile().memory_analysis()
    assert memory is not None
    return {
        "pool": sum(x.size * x.dtype.itemsize for x in pool.values()) // 4,
        "bfloat16": pool["numbers"].size * 2 // 4,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
