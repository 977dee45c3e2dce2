"""What was encoded comes back to the bit, or not at all."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl.weights.encoding import EncodedWeights, Manifest, WeightsError, decode, encode
from tests.rl.tiny import tiny_params, tiny_policy


def tree(seed: int = 0) -> dict:
    """Odd sizes on purpose, so that arrays do not start at multiples of their item size."""
    rng = np.random.default_rng(seed)
    return {
        "odd": rng.integers(0, 255, 3).astype(np.uint8),
        "half": {"w": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)},
        "layers": {"a": {"w": rng.standard_normal((2, 3, 4)).astype(np.float32)}, "flag": np.array([True, False])},
        "scalar": np.float32(rng.standard_normal()),
        "step": np.int32(seed),
        "empty": np.zeros((0, 4), np.float32),
    }


def assert_same_bits(found: dict, expected: dict) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        other = np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def test_round_trip_of_every_kind_of_array():
    weights = encode(tree(), 7)
    assert_same_bits(decode(weights), tree())
    assert weights.manifest.version == 7
    assert weights.manifest.nbytes == len(weights.buffer) == sum(e.nbytes for e in weights.manifest.entries)


def test_round_trip_of_a_models_parameters_from_the_device_and_of_nothing():
    params = tiny_params(tiny_policy())
    assert_same_bits(decode(encode(jax.tree.map(jnp.asarray, params), 0)), params)
    assert decode(encode({}, 3)) == {}


@settings(deadline=None, max_examples=50)
@given(
    array=hnp.arrays(
        st.sampled_from([np.float32, np.float16, np.int32, np.int8, np.bool_, ml_dtypes.bfloat16]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.just(1) | st.just(0),
    )
)
def test_round_trip_of_any_shape_behind_an_odd_byte(array: np.ndarray):
    params = {"a": np.zeros(1, np.int8), "b": array}
    assert_same_bits(decode(encode(params, 0)), params)


def test_an_array_in_another_memory_order_is_encoded_by_its_values():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert encode({"w": np.asfortranarray(matrix)}, 0) == encode({"w": matrix}, 0)


def test_the_manifest_survives_json():
    manifest = encode(tree(), 2).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_every_flipped_byte_is_found():
    weights = encode({"w": np.arange(10, dtype=np.float32), "z": np.int8(1)}, 4)
    for index in range(len(weights.buffer)):
        damaged = bytearray(weights.buffer)
        damaged[index] ^= 1
        with pytest.raises(WeightsError, match="weights of version 4 are damaged"):
            decode(EncodedWeights(weights.manifest, damaged))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_buffer_of_another_length_is_refused_with_both_lengths(change: int):
    weights = encode({"w": np.arange(10, dtype=np.float32)}, 4)
    buffer = bytes(weights.buffer)[:change] if change < 0 else bytes(weights.buffer) + b"\0"
    with pytest.raises(WeightsError, match=f"version 4: {40 + change} bytes arrived, the manifest says 40"):
        decode(EncodedWeights(weights.manifest, buffer))


def test_the_checksum_covers_version_names_shapes_and_types():
    weights = encode({"w": np.zeros((2, 3), np.float32)}, 4)
    entry = weights.manifest.entries[0]
    for manifest in (
        dataclasses.replace(weights.manifest, version=5),
        dataclasses.replace(weights.manifest, entries=(dataclasses.replace(entry, path="v"),)),
        dataclasses.replace(weights.manifest, entries=(dataclasses.replace(entry, shape=(3, 2)),)),
        dataclasses.replace(weights.manifest, entries=(dataclasses.replace(entry, dtype="int32"),)),
    ):
        with pytest.raises(WeightsError, match="damaged"):
            decode(EncodedWeights(manifest, weights.buffer))
