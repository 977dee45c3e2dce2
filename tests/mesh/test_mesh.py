"""A mesh that fits is made; one that does not is explained."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from mesh import MESH_AXES, MeshError, UserError, make_mesh
from mesh.mesh import PlaceholderDevice
from mesh.topology import find_compiler, prepare_compiler

# More devices than there are, for shapes that are refused before any device is used.
EIGHT = jax.devices()[:1] * 8


def test_all_axes_are_there_and_explicit():
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    assert mesh.axis_names == MESH_AXES
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    assert set(mesh.shape.values()) == {1}


def test_minus_one_takes_what_is_left():
    assert make_mesh({"fsdp": -1}, jax.devices()[:1]).shape["fsdp"] == 1
    mesh = make_mesh({"data": 2, "fsdp": -1, "tensor": 2}, EIGHT)
    assert (mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["tensor"]) == (2, 2, 2)


def test_without_any_axis_it_is_the_first_device_alone():
    for shape in (None, {}):
        assert make_mesh(shape, EIGHT).devices.size == 1


def test_the_last_axis_holds_neighbours():
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, EIGHT)
    assert mesh.devices.shape == (1, 1, 4, 1, 1, 2)
    assert np.all(mesh.devices == jax.devices()[0])


def test_an_unknown_axis_is_answered_with_the_right_one():
    with pytest.raises(MeshError, match=r"no axis 'tensors'; did you mean 'tensor'\?"):
        make_mesh({"tensors": 8}, EIGHT)
    with pytest.raises(MeshError, match=r"no axis 'xyz'; known: data, expert, fsdp, pipeline, sequence, tensor"):
        make_mesh({"xyz": 8}, EIGHT)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"fsdp": 4}, "fsdp 4 needs 4 devices but there are 8 (cpu); fsdp 8 would fit"),
        ({"fsdp": 8, "tensor": 2}, "fsdp 8 x tensor 2 needs 16 devices but there are 8 (cpu); fsdp 4 x tensor 2 would"),
        ({"tensor": 2, "data": 8}, "there are 8 (cpu); data 4 x tensor 2 would fit"),
        ({"fsdp": -1, "tensor": 3}, "fsdp 2 x tensor 3 needs 6 devices but there are 8 (cpu); fsdp 8 would fit"),
        ({"fsdp": -1, "tensor": 16}, "needs 16 devices but there are 8 (cpu); fsdp 8 would fit"),
        ({"tensor": 2}, "tensor 2 needs 2 devices but there are 8 (cpu); fsdp 4 x tensor 2 would fit"),
    ],
)
def test_a_product_that_does_not_fit_comes_with_one_that_does(shape, words):
    with pytest.raises(MeshError) as error:
        make_mesh(shape, EIGHT)
    assert words in str(error.value)


def test_two_free_axes_are_refused():
    with pytest.raises(MeshError, match=r"only one mesh axis may be -1, got data, fsdp"):
        make_mesh({"data": -1, "fsdp": -1}, EIGHT)


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(MeshError, match=rf"'tensor' has size {size}; expected 1 or more, or -1"):
        make_mesh({"tensor": size}, EIGHT)


def test_the_error_is_one_that_the_user_can_mend():
    assert issubclass(MeshError, UserError)


class OfASlice:
    """Fields of an accelerator that a mesh looks at."""

    platform = "gpu"

    def __init__(self, index: int, slice_index: int):
        self.id, self.slice_index = index, slice_index


def order(shape: dict[str, int], devices: Any, slices: dict[str, int] | None = None) -> list[int]:
    return [device.id for device in make_mesh(shape, devices, slices=slices).devices.flat]


def test_slices_lie_along_the_axes_that_go_over_them():
    mixed = [OfASlice(i, i % 2) for i in range(8)]  # even ones and odd ones
    even, odd = [0, 2, 4, 6], [1, 3, 5, 7]
    assert order({"data": 2, "fsdp": 4}, mixed) == even + odd  # the first axis, where nothing is said
    assert order({"data": 2, "fsdp": 4}, mixed, {"data": 2}) == even + odd
    assert order({"data": 2, "fsdp": 4}, mixed, {"fsdp": 2}) == [0, 2, 1, 3, 4, 6, 5, 7]
    assert order({"fsdp": 8}, mixed, {"fsdp": 2}) == even + odd
    four = [OfASlice(i, i // 2) for i in range(8)]
    assert order({"data": 4, "tensor": 2}, four, {"data": 2, "tensor": 2}) == [0, 2, 1, 3, 4, 6, 5, 7]


def test_equal_parts_of_cpu_devices_stand_for_slices():
    unseen = [PlaceholderDevice() for _ in range(8)]
    made = make_mesh({"data": 2, "fsdp": -1}, unseen, slices={"fsdp": 2}).devices.flat
    assert [unseen.index(device) for device in made] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_slices_that_are_not_there_are_refused():
    one = [OfASlice(i, 0) for i in range(8)]
    with pytest.raises(MeshError, match=r"slices data 2 is for 2 slices but there is 1"):
        make_mesh({"data": 2, "fsdp": 4}, one, slices={"data": 2})
    three = [OfASlice(i, i // 4) for i in range(12)]
    with pytest.raises(MeshError, match=r"slices data 2 x fsdp 2 is for 4 slices but there are 3"):
        make_mesh({"data": 2, "fsdp": 6}, three, slices={"data": 2, "fsdp": 2})
    with pytest.raises(MeshError, match=r"axis 'data', the first, has size 2, which does not divide over 3 slices"):
        make_mesh({"data": 2, "fsdp": 6}, three)
    with pytest.raises(MeshError, match=r"slices axis 'data' has size -1; expected 1 or more$"):
        make_mesh({"data": 2, "fsdp": 4}, EIGHT, slices={"data": -1})
    with pytest.raises(MeshError, match=r"slices has no axis 'dat'; did you mean 'data'"):
        make_mesh({"data": 2, "fsdp": 4}, EIGHT, slices={"dat": 2})


def test_an_axis_goes_over_slices_as_it_is_told():
    if find_compiler() is None:
        pytest.skip("the TPU compiler (libtpu) is not installed")
    prepare_compiler()
    two = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4", num_slices=2).devices
    mesh = make_mesh({"data": 4, "fsdp": 8}, two, slices={"data": 2})
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices.reshape(4, 8))
    np.testing.assert_array_equal(slices, [[0] * 8, [0] * 8, [1] * 8, [1] * 8])
    assert make_mesh({"fsdp": 32}, two).devices.reshape(2, 16)[1, 0].slice_index == 1
    with pytest.raises(MeshError, match=r"mesh axis 'data' has size 1, no multiple of slices.data=2"):
        make_mesh({"fsdp": 32}, two, slices={"data": 2})
