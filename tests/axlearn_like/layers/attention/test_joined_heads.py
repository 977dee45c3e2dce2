"""Queries, keys and values by one product: the same to the bit as by three, and where they are not joined."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.kernels.quantised_matmul import quantised_products
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.joined_heads import joins_heads
from axlearn_like.layers.attention.rope import InterleavedRope, NoPositions, Rope
from axlearn_like.layers.base import bind
from axlearn_like.layers.norm import OffsetRMSNorm, RMSNorm
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from mesh import make_mesh
from tests.axlearn_like.layers.small import initialise
from tests.elsewhere import elsewhere

DIM, ROWS = 192, 64
GROUPED = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "qk_norm": RMSNorm.Config()}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": GROUPED,
    "offset norms": GROUPED | {"qk_norm": OffsetRMSNorm.Config()},
    "no norms": GROUPED | {"qk_norm": None},
    "biases": GROUPED | {"qkv_bias": True},
    "multi-head": {"num_heads": 3, "head_dim": 64},
    "wide heads": GROUPED | {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
}
EVERY_RUN = ("grouped", "no norms", "biases")


class Record:
    """A context whose attention is the first query head of each key head; it returns what it was called with."""

    decodes: ClassVar[bool] = True

    def __init__(self, rows: int, length: int = 1):
        self.positions = jnp.asarray(np.arange(rows * length).reshape(rows, length) * 7 % 96)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, attention: Any) -> tuple[jax.Array, Any]:
        del cache, attention
        return q, (q, k, v)


class NoStep(Record):
    """The same, not of a decoding step."""

    decodes: ClassVar[bool] = False


def build(kind: dict[str, Any]) -> tuple[Any, Any]:
    """Return an attention layer, all of its numbers random."""
    graphdef, params = initialise(Attention.Config(**{"rope": Rope.Config(theta=1e4), **kind}, dim=DIM))
    numbers = np.random.default_rng(3)
    return graphdef, jax.tree.map(lambda x: x + 0.3 * numbers.normal(size=x.shape).astype(np.float32), params)


def drawn(rows: int = ROWS, length: int = 1) -> jax.Array:
    """Return inputs of a layer."""
    return jnp.asarray(np.random.default_rng(5).normal(size=(rows, length, DIM)).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        *((kind, ROWS) for kind in EVERY_RUN),
        *(pytest.param(kind, ROWS, marks=pytest.mark.full) for kind in KINDS if kind not in EVERY_RUN),
        pytest.param("grouped", 72, marks=pytest.mark.full),
    ],
)
def test_it_is_the_same_to_the_bit(kind: str, rows: int):
    graphdef, params = build(KINDS[kind])

    def run(context: Any) -> list[Any]:
        def step(params: Any, x: jax.Array) -> Any:
            layer = bind(graphdef, params)
            assert joins_heads(layer, x, context) == context.decodes
            return layer(x, context, None)

        with jax.set_mesh(make_mesh()):
            return jax.tree.leaves(jax.jit(step)(params, drawn(rows)))

    for joined, apart in zip(run(Record(rows)), run(NoStep(rows)), strict=True):
        np.testing.assert_array_equal(joined, apart)


@pytest.mark.parametrize(
    ("kind", "x", "why"),
    [
        (GROUPED, drawn(63), "few rows, which are multiplied by some columns at a time"),
        (GROUPED, drawn(64, 2), "more tokens than one a row"),
        (GROUPED, drawn().astype(jnp.bfloat16), "not float32"),
        (GROUPED | {"num_kv_heads": 3, "head_dim": 32}, drawn(), "key heads that are not whole 64s"),
        (GROUPED | {"rope": NoPositions.Config()}, drawn(), "no rotation"),
        (GROUPED | {"rope": InterleavedRope.Config()}, drawn(), "another rotation"),
    ],
)
def test_other_steps_are_computed_apart(kind: dict[str, Any], x: jax.Array, why: str):
    graphdef, params = build(kind)
    assert not joins_heads(bind(graphdef, params), x, Record(*x.shape[:2])), why


@pytest.mark.parametrize(
    "scope", [quantised_products("int8"), use_numerics("exact", interpret=True)], ids=["int8", "exact"]
)
def test_other_products_are_computed_apart(scope: Any):
    graphdef, params = build(GROUPED)
    with scope:
        assert not joins_heads(bind(graphdef, params), drawn(), Record(ROWS))


def test_a_matrix_in_another_form_is_multiplied_alone():
    layer = bind(*build(GROUPED))
    layer.k_dkh = nnx.Param(StackEntry(layer.k_dkh[...][None], jnp.int32(0)))
    assert not joins_heads(layer, drawn(), Record(ROWS))


def test_norms_that_differ_are_computed_apart():
    layer = bind(*build(GROUPED))
    layer.k_norm.eps = 2 * layer.q_norm.eps
    assert not joins_heads(layer, drawn(), Record(ROWS))


def joined_on(axes: dict[str, int]) -> bool:
    layer = bind(*build(GROUPED))
    with jax.set_mesh(make_mesh(axes)):
        return joins_heads(layer, drawn(), Record(ROWS))


def test_on_several_devices_they_are_computed_apart():
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert joined_on({}) and not elsewhere(joined_on, {"tensor": 2}, environ=two)
