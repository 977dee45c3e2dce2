"""Sums of fixed parts: added by a tree, and the same bits on one device, two, four and eight (simulated)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.deterministic import exponentials
from axlearn_like.kernels.exact.parts import check_devices, parts_of, sum_over_devices, tree_sum
from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.layers.embedding import _look_up
from axlearn_like.layers.linear import project
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from mesh import UserError, make_mesh
from mesh.rules import constrain, partition
from tests.elsewhere import elsewhere

EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
MESHES: tuple[dict[str, int], ...] = ({"tensor": 2}, {"tensor": 8}, {"data": 2, "tensor": 4})
PRODUCTS = ("column", "row", "stack")
HEADS, WIDTH, OUT, WORDS = 8, 20, 24, 64


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_pairs(parts: list[np.ndarray]) -> np.ndarray:
    """Add neighbours, then neighbours of the sums, in float32."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def test_a_sum_has_as_many_parts_as_divide_it():
    assert [parts_of(size) for size in (1, 6, 20, 8960, 151_936, 4096)] == [1, 2, 4, 8, 8, 8]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_tree_adds_neighbours_first(count: int):
    parts = list(numbers(count, 1000))
    np.testing.assert_array_equal(tree_sum(lambda index: jnp.asarray(parts[index]), count), by_pairs(parts))
    if count == 8:
        assert np.any(by_pairs(parts) != sum(parts[1:], parts[0]))  # or any order would do


def test_other_numbers_of_devices_are_refused():
    assert [check_devices("heads", {"tensor": size}) for size in (1, 2, 4, 8)] == [1, 2, 4, 8]
    with pytest.raises(UserError, match=r"hidden are sharded over 3 devices \(tensor 3\); expected 1, 2, 4 or 8"):
        check_devices("hidden", {"tensor": 3})
    with pytest.raises(UserError, match=r"16 devices \(sequence 2 x tensor 8\)"):
        check_devices("heads", {"sequence": 2, "tensor": 8})


@pytest.mark.slow
@pytest.mark.numerics
def test_devices_and_rows_change_no_bit():
    alone = computed({})
    by_float64(alone)
    found = elsewhere(on_meshes, environ=EIGHT_DEVICES)
    for mesh, results in zip(MESHES, found["meshes"], strict=True):
        for name, expected in alone.items():
            np.testing.assert_array_equal(np.asarray(results[name], np.float32), expected, f"{name} on {mesh}")
    for count, summed in found["sums"].items():
        parts = list(numbers(int(count), 3, 13))
        np.testing.assert_array_equal(np.asarray(summed, np.float32), by_pairs(parts).astype(jnp.bfloat16))
    assert found["few rows"] == [np.asarray(alone[name])[3:5].tolist() for name in PRODUCTS]


def by_float64(found: dict[str, Any]) -> None:
    """Compare with float64, or all might be wrong alike."""
    x, down = (np.asarray(a, np.float64) for a in (numbers(8, 1, HEADS, WIDTH), numbers(HEADS, WIDTH, OUT, seed=1)))
    right = np.einsum("btkh,kho->bto", x, down)
    np.testing.assert_allclose(found["row"], right, atol=1e-6 * np.abs(right).max())
    np.testing.assert_allclose(found["stack"], right, atol=1e-6 * np.abs(right).max())
    logits = numbers(8, 1, WORDS, seed=3).astype(np.float64)
    total = np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
    np.testing.assert_allclose(found["words"], total, rtol=1e-6)


def on_meshes() -> dict[str, Any]:
    """Return the results on all meshes of eight devices, and the sums of partial sums."""
    found = [jax.tree.map(lambda x: np.asarray(x, np.float32).tolist(), computed(sizes)) for sizes in MESHES]
    sums = {}
    for count in (2, 4, 8):
        with jax.set_mesh(make_mesh({"tensor": count}, jax.devices()[:count])):
            run: Any = partial(sum_over_devices, axes=("tensor",), dtype=jnp.bfloat16)
            own = jax.shard_map(
                lambda x, run=run: run(x[0]), in_specs=jax.P("tensor"), out_specs=jax.P(), check_vma=False
            )
            sharded = jax.device_put(numbers(count, 3, 13), jax.P("tensor"))
            sums[count] = np.asarray(jax.jit(own)(sharded), np.float32).tolist()
    few = computed({"tensor": 4}, slice(3, 5))
    return {"meshes": found, "sums": sums, "few rows": [np.asarray(few[name]).tolist() for name in PRODUCTS]}


def computed(sizes: dict[str, int], rows: slice = slice(0, 8)) -> dict[str, Any]:
    """Return products, a sum over words and embeddings of some rows, on a mesh; {}: without one."""
    if not sizes:
        return _computed(rows)
    with jax.set_mesh(make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])):
        return _computed(rows)


def _computed(rows: slice) -> dict[str, Any]:
    table = numbers(WORDS, OUT, seed=2)
    table[::3, 0] = -0.0
    arrays = numbers(8, 1, HEADS, WIDTH), numbers(HEADS, WIDTH, OUT, seed=1), numbers(8, 1, WORDS, seed=3), table

    @jax.jit
    def run(x: jax.Array, down: jax.Array, logits: jax.Array, table: jax.Array) -> dict[str, jax.Array]:
        x, logits = constrain(x, "batch", None, "heads", None), constrain(logits, "batch", None, "vocab")
        down, table = constrain(down, "heads", None, None), constrain(table, "vocab", None)
        stack = jnp.stack([down * 2, down])
        up: Any = jnp.reshape(down, (HEADS * WIDTH, OUT), out_sharding=partition("heads", None)).T
        flat = jnp.reshape(x, (*x.shape[:2], HEADS * WIDTH), out_sharding=partition("batch", None, None))
        tokens = constrain(jnp.arange(8)[rows, None] * 3 % WORDS, "batch", None)
        column = project(flat, constrain(up.T, None, "hidden"), out_axis="hidden")
        found = {
            "column": column,
            "row": project(x, down, inputs=2, in_axis="heads"),
            "stack": project(x, StackEntry(stack, jnp.int32(1)), inputs=2, in_axis="heads"),
            "words": exponentials(logits, "vocab")[1],
            "embedding": _look_up(table, tokens, jnp.float32),
        }
        return {**found, "signs": jnp.signbit(found["embedding"]).astype(jnp.float32)}

    with use_numerics("exact", interpret=True):
        return run(arrays[0][rows], arrays[1], arrays[2][rows], table)
