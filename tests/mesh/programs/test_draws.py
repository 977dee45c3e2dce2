"""Arrays drawn on the host, in parts, beside the jitted initializer, to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from mesh.programs import draws
from mesh.programs.draws import CHUNK, Draw, TruncatedNormal, can_draw, drawn


def by_program(draw: Draw) -> np.ndarray:
    """The array as one program makes it."""

    def entry(key: jax.Array) -> jax.Array:
        return draw.init(key, draw.entry, draw.dtype)

    return np.asarray(jax.jit(jax.vmap(entry) if draw.key.ndim else entry)(draw.key))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "layers", "stddev"), [((3, 5), 2, 0.02), ((CHUNK,), None, 1.0), ((3, CHUNK // 2 + 7), 2, 192**-0.5)]
)
def test_a_drawn_array_has_the_bits_of_the_program(entry: tuple[int, ...], layers: int | None, stddev: float):
    key = jax.random.fold_in(jax.random.key(5), 3)
    draw = Draw(key if layers is None else jax.random.split(key, layers), TruncatedNormal(stddev), entry, jnp.float32)
    found, wanted = drawn(draw), by_program(draw)
    assert found.shape == draw.shape and found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "dtype"),
    [
        (jax.nn.initializers.zeros, jnp.bfloat16),
        (jax.nn.initializers.ones, jnp.float32),
        (TruncatedNormal(1.0), jnp.bfloat16),
    ],
)
def test_constants_and_other_types_are_those_of_the_program(init: Any, dtype: Any):
    draw = Draw(jax.random.split(jax.random.key(1), 2), init, (4, 3), dtype)
    np.testing.assert_array_equal(drawn(draw), by_program(draw), strict=True)


@pytest.mark.slow
@settings(max_examples=20)
@given(first=st.integers(0, 2**40 // CHUNK - 1), seed=st.integers(0, 2**32 - 1))
def test_bits_from_an_index_on_are_those_of_the_counter(first: int, seed: int):
    start, key = first * CHUNK, np.array([seed, 7], np.uint32)
    index = start + np.arange(CHUNK, dtype=np.uint64)
    words = np.concatenate([index >> np.uint64(32), index % np.uint64(2**32)]).astype(np.uint32)
    left, right = np.split(np.asarray(threefry_2x32(jnp.asarray(key), jnp.asarray(words))), 2)
    place = np.array([*key, start >> 32, start % 2**32], np.uint32)
    found = draws._bits(jnp.asarray(place), 32, (CHUNK,))  # pyright: ignore[reportPrivateUsage]
    np.testing.assert_array_equal(np.asarray(found), left ^ right)


def test_only_jax_s_default_generator_draws_on_the_host():
    assert can_draw(set(jax.devices()))
    with jax.threefry_partitionable(False):
        assert not can_draw(set(jax.devices()))
