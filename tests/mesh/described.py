"""Meshes of devices that are only described, without any compiler."""

import math
from typing import Any

import jax
import numpy as np

from mesh import MESH_AXES


class Described:
    """A device at a place."""

    platform, device_kind = "tpu", "TPU v5"

    def __init__(self, index: int, coords: tuple[int, ...], slice_index: int | None = None):
        self.id, self.coords, self.slice_index = index, coords, slice_index


class DescribedMesh:
    """Fields of a mesh that the accounts of communication read."""

    def __init__(self, devices: np.ndarray):
        self.devices, self.axis_names = devices, MESH_AXES
        self.shape = dict(zip(MESH_AXES, devices.shape, strict=True))


def described_mesh(chips: tuple[int, ...] | None = None, slices: int = 1, **axes: int) -> jax.sharding.Mesh:
    """Describe a mesh of that shape, in the order of the chips' places, the slices outermost."""
    count = math.prod(axes.values())
    chips = chips or (count // slices,)
    devices = np.empty(count, object)
    for index in range(count):
        which, place = divmod(index, count // slices)
        coords = tuple(int(n) for n in np.unravel_index(place, chips))
        devices[index] = Described(index, coords, which if slices > 1 else None)
    mesh: Any = DescribedMesh(devices.reshape([axes.get(name, 1) for name in MESH_AXES]))
    return mesh
