"""Cascade attention on TPU: what it computes (simulated on CPU), and that the TPU compiler takes it in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.cascade_attention import cascade_attention_tpu, merge
from axlearn_like.kernels.ragged_paged_attention import make_pool
from mesh import make_mesh
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

PAGE, TILE, WIDTH = 4, 3, 6
SHARED = [16, 0, 8]  # of three tiles; the last has one row
LENGTHS = [19, 16, 23, 1, 9, 0, 12]  # the last key included; 0: an idle row
CASES = {
    "float32": (2, 3, 128, "float32", ScoreRules()),
    "bfloat16, one head of keys": (1, 2, 128, "bfloat16", ScoreRules()),
    "narrow, cap, scale": (2, 1, 64, "float32", ScoreRules(soft_cap=2.0, scale=0.3)),
}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * ("cap" in one)) for one in CASES])
def test_against_plain_attention_in_float64(name: str):
    kv_heads, per_head, width, dtype, rules = CASES[name]
    rng, rows = np.random.default_rng(0), len(LENGTHS)
    k, v = (_rounded(rng.standard_normal((rows, WIDTH * PAGE, kv_heads, width)), dtype) for _ in range(2))
    q = _rounded(rng.standard_normal((rows, 1, kv_heads, per_head, width)), dtype)
    table = rng.permutation(np.arange(1, 1 + rows * WIDTH)).reshape(rows, WIDTH).astype(np.int32)
    for tile, keys in enumerate(SHARED):
        some = slice(tile * TILE, (tile + 1) * TILE)
        for x in (k, v):
            x[some, :keys] = x[tile * TILE, :keys]
    pool = np.asarray(make_pool(1, 1 + rows * WIDTH, PAGE, kv_heads, width, dtype)) + np.float32(9)  # of others
    pool = pool.astype(dtype)
    for row, length in enumerate(LENGTHS):
        for position in range(length - 1):
            slot = pool[table[row, position // PAGE], position % PAGE]
            slot[0::2, :width], slot[1::2, :width] = k[row, position], v[row, position]
            slot[:, width:] = 0
    starts = np.maximum(np.array(LENGTHS, np.int32) - 1, 0)
    new = [np.take_along_axis(x, starts[:, None, None, None], axis=1) for x in (k, v)]
    sources = np.array([0, 3, 6], np.int32)

    mixed, written = jax.jit(
        lambda *arrays: cascade_attention_tpu(
            *arrays[:4],
            page_table_rw=arrays[4],
            starts_r=arrays[5],
            counts_r=arrays[6],
            shared_t=arrays[7],
            sources_t=arrays[8],
            tile=TILE,
            rules=rules,
            interpret=True,
        )
    )(q, *new, pool, table, starts, np.array(LENGTHS, np.int32).clip(0, 1), np.array(SHARED, np.int32), sources)

    tolerance = 2e-2 if dtype == "bfloat16" else 2e-5
    for row, length in enumerate(LENGTHS):
        expected = np.zeros((kv_heads, per_head, width))
        if length:
            keys, values = (x[row, :length].astype(np.float64) for x in (k, v))
            scores = np.einsum("kqh,skh->kqs", q[row, 0].astype(np.float64), keys) * rules.scale_of(width)
            scores = scores if rules.soft_cap is None else rules.soft_cap * np.tanh(scores / rules.soft_cap)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("kqs,skh->kqh", weights / weights.sum(-1, keepdims=True), values)
            slot = np.asarray(written)[table[row, (length - 1) // PAGE], (length - 1) % PAGE]
            np.testing.assert_array_equal(slot[0::2, :width], k[row, length - 1])
        np.testing.assert_allclose(np.asarray(mixed, np.float64)[row, 0], expected, rtol=tolerance, atol=tolerance)


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.array(jnp.asarray(x, dtype))


def test_parts_without_keys_have_no_weight():
    mixed, sums = jnp.ones((1, 2, 4)), jnp.full((1, 2, 128), 3.0)
    empty = jnp.zeros_like(mixed), jnp.full_like(sums, MASKED)
    np.testing.assert_array_equal(merge([empty, (mixed, sums)]), mixed)
    np.testing.assert_array_equal(merge([empty, empty]), empty[0])


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_tpu_compiler_updates_the_pool_in_place(topology: str):
    found = elsewhere(compile_for_tpu, topology, environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"]
    assert found["temporary"] < 0.05 * found["pool"]


def compile_for_tpu(topology: str) -> dict[str, int]:
    """Bytes per device: 64 rows in tiles of 16, 8,192 keys each, heads of Qwen3-8B over four devices."""
    from jax.experimental import topologies

    layers, pages, rows, width = 4, 4096, 64, 512
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    with jax.set_mesh(make_mesh({"tensor": 4}, devices)):
        mesh = jax.sharding.get_mesh()
        heads, whole = jax.NamedSharding(mesh, jax.P(None, None, "tensor")), jax.NamedSharding(mesh, jax.P())

        def run(q, k, v, pool, *numbers):
            table, starts, counts, shared, sources = numbers

            def layer(pool, index):
                mixed, pool = cascade_attention_tpu(
                    *(q, k, v, pool),
                    page_table_rw=table + index * pages,
                    starts_r=starts,
                    counts_r=counts,
                    shared_t=shared,
                    sources_t=sources,
                    tile=16,
                    rules=ScoreRules(),
                )
                return pool, mixed

            return jax.lax.scan(layer, pool, jnp.arange(layers))

        def array(*shape, dtype=jnp.bfloat16, sharding=heads):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        pool = array(*jax.eval_shape(lambda: make_pool(layers, pages, 16, 8, 128)).shape)
        numbers = [(rows, width), (rows,), (rows,), (4,), (4,)]
        arrays = [array(*shape, dtype=jnp.int32, sharding=whole) for shape in numbers]
        kv, q = array(rows, 1, 8, 128), array(rows, 1, 8, 4, 128)
        memory = jax.jit(run, donate_argnums=3).lower(q, kv, kv, pool, *arrays).compile().memory_analysis()
    assert memory is not None
    return {
        "pool": pool.size * pool.dtype.itemsize // 4,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
