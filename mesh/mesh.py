"""The one named mesh on which everything runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from mesh.errors import UserError, did_you_mean

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")


class MeshError(UserError):
    """A mesh shape that does not exist or does not fit the devices."""


def make_mesh(
    shape: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
    *,
    slices: Mapping[str, int] | None = None,
) -> Mesh:
    """Lay the devices out on the six named axes, all of them in explicit-sharding mode.

    On TPUs neighbours on an axis are neighbours in the torus where that is possible.

    Args:
        shape: axis name -> size. Absent axes have size 1; one axis may be -1 and takes what is left. Without any
            axis: the first device alone.
        devices: the devices to use; all of them by default, those of other processes of the program included.
        slices: of those sizes, the factors that go over slices (groups of devices that only the data centre's network
            joins): `{"data": 4}` for four slices, each of which has the rest of every axis. Their product is the number
            of slices. None: there is one slice, or the first axis of `shape` goes over all of them.

    Raises:
        MeshError: unknown axis, a size below 1, or a product that is not the number of devices or of slices.
    """
    shape = dict(shape or {})
    if not shape and devices is None and jax.process_count() > 1:
        raise MeshError(f"mesh has no axes, but {jax.process_count()} processes share it; expected e.g. {{'fsdp': -1}}")
    devices = list(jax.devices() if devices is None else devices)
    if not shape:
        devices = devices[:1]
    _check_names(shape, "mesh")
    _check_names(slices or {}, "slices")
    free = [name for name, size in shape.items() if size == -1]
    if len(free) > 1:
        raise MeshError(f"only one mesh axis may be -1, got {', '.join(free)}")
    fixed = math.prod(size for size in shape.values() if size != -1)
    if free:
        shape[free[0]] = max(1, len(devices) // fixed)
    total = math.prod(shape.values())
    if total != len(devices):
        raise MeshError(
            f"mesh {_describe(shape)} needs {total} devices but there are {len(devices)} "
            f"({devices[0].platform}); {_nearest(shape, len(devices))}"
        )
    grid = _lay_out(shape, devices, _over_slices(shape, devices, slices))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))


def _check_names(shape: Mapping[str, int], what: str) -> None:
    for name, size in shape.items():
        if name not in MESH_AXES:
            raise MeshError(f"{what} has no axis {name!r}{did_you_mean(name, MESH_AXES)}")
        if size < 1 and (size != -1 or what == "slices"):
            raise MeshError(f"{what} axis {name!r} has size {size}; expected 1 or more, or -1")


def _over_slices(
    shape: Mapping[str, int], devices: Sequence[Any], slices: Mapping[str, int] | None
) -> dict[str, int]:
    """By axis, the factor that goes over slices."""
    count = len({getattr(device, "slice_index", 0) for device in devices})
    if slices is None:
        slices = {next((name for name in MESH_AXES if shape.get(name, 1) > 1), "data"): count} if count > 1 else {}
    if math.prod(slices.values()) != count:
        raise MeshError(f"slices {_describe(slices)} is for {math.prod(slices.values())} slices but there are {count}")
    for name, factor in slices.items():
        if shape.get(name, 1) % factor:
            raise MeshError(f"mesh axis {name!r} has size {shape.get(name, 1)}, no multiple of slices.{name}={factor}")
    return dict(slices)


def _lay_out(shape: Mapping[str, int], devices: Sequence[Any], over: Mapping[str, int]) -> np.ndarray:
    sizes = [shape.get(name, 1) for name in MESH_AXES]
    if devices[0].platform != "tpu" or len(devices) == 1:
        return np.asarray(devices).reshape(sizes)
    outer = [over.get(name, 1) for name in MESH_AXES]
    if math.prod(outer) == 1:
        try:
            return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        except NotImplementedError:  # of sizes that no cut of the torus has
            return np.asarray(devices).reshape(sizes)
    inner = [size // factor for size, factor in zip(sizes, outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)


def _describe(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in shape.items())


def _nearest(shape: Mapping[str, int], count: int) -> str:
    """The nearest shape that fits: keep the inner axes, let the outermost one named take the rest."""
    names = [name for name in MESH_AXES if name in shape] or ["fsdp"]
    inner = math.prod(shape.get(name, 1) for name in names[1:])
    if count % inner == 0:
        fit = {**{name: shape.get(name, 1) for name in names}, names[0]: count // inner}
        return f"{_describe(fit)} would fit"
    return f"fsdp {count} would fit"
