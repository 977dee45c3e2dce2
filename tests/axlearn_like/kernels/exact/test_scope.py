"""The scope of exact numerics: where kernels are in force, what is refused within, and meshes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from axlearn_like.kernels.deterministic import row_sum, sum_of_squares
from axlearn_like.kernels.exact.scope import exact_kernels, refuse_exact, use_numerics
from axlearn_like.layers.linear import project
from mesh import UserError
from mesh.mesh import MESH_AXES
from mesh.rules import constrain, mesh_axes


def mesh_of(kind: str, platform: str, **sizes: int) -> Any:
    device: Any = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_kernels_are_in_force_on_tpus_and_where_they_are_simulated():
    with use_numerics("exact"):
        assert exact_kernels() is None
        with mesh_of("TPU v6 lite", "tpu"):
            assert exact_kernels() == (False,)
            with use_numerics("default"):
                assert exact_kernels() is None
        with mesh_of("NVIDIA H200", "gpu"), pytest.raises(UserError, match="no kernels of fixed order for GPUs"):
            exact_kernels()
    with use_numerics("exact", interpret=True), use_numerics("exact"):
        assert exact_kernels() == (True,)
    refuse_exact("anything")
    with use_numerics("exact", interpret=True), pytest.raises(UserError, match="a router has no form of fixed order"):
        refuse_exact("a router")


def test_rows_and_parameters_may_be_sharded_and_heads_over_a_power_of_two():
    def sums(x: jax.Array) -> jax.Array:
        with use_numerics("exact"):
            return sum_of_squares(constrain(x, "batch", None))

    with mesh_of("TPU v6 lite", "tpu", data=2, fsdp=2):
        found = jax.eval_shape(sums, jax.ShapeDtypeStruct((8, 256), jnp.bfloat16))
        assert found.shape == (8, 1) and found.dtype == jnp.float32
        assert found.sharding.spec[0] == ("data", "fsdp")

    def summed(x: jax.Array, down: jax.Array) -> jax.Array:
        with use_numerics("exact"):
            x, down = constrain(x, "batch", None, "heads", None), constrain(down, "heads", None, None)
            return project(x, down, inputs=2, in_axis="heads")

    arrays = jax.ShapeDtypeStruct((8, 1, 12, 64), jnp.bfloat16), jax.ShapeDtypeStruct((12, 64, 32), jnp.bfloat16)
    with mesh_of("TPU v6 lite", "tpu", data=2, tensor=4):
        found = jax.eval_shape(summed, *arrays)
        assert found.shape == (8, 1, 32) and found.sharding.spec == jax.P("data", None, None)
    with mesh_of("TPU v6 lite", "tpu", tensor=3), pytest.raises(UserError, match=r"3 devices \(tensor 3\); expected 1"):
        jax.eval_shape(summed, *arrays)


def test_a_sum_with_fewer_parts_than_devices_is_refused():
    def sums(x: jax.Array, axis: str | None) -> jax.Array:
        with use_numerics("exact"):
            return row_sum(constrain(x, "batch", "hidden"), axis)

    described = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    with mesh_of("TPU v6 lite", "tpu", tensor=2):
        assert jax.eval_shape(partial(sums, axis="hidden"), described).shape == (8, 1)
        with pytest.raises(UserError, match=r"unnamed entries has 1 parts, which 2 devices \(tensor\) cannot share"):
            jax.eval_shape(partial(sums, axis=None), described)


def test_tokens_between_layers_are_not_sharded_over_tensor():
    with mesh_of("TPU v6 lite", "tpu", tensor=2, sequence=2):
        assert mesh_axes("residual") == ("sequence", "tensor")
        with use_numerics("exact"):
            assert mesh_axes("residual") == ("sequence",)
