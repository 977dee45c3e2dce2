"""The one named mesh on which everything runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mesh.errors import UserError, did_you_mean

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")


class MeshError(UserError):
    """A mesh shape that does not exist or does not fit the devices."""


def make_mesh(shape: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay the devices out on the six named axes, all of them in explicit-sharding mode.

    Args:
        shape: axis name -> size. Absent axes have size 1; one axis may be -1 and takes what is left. Without any
            axis: the first device alone.
        devices: the devices to use; all of them by default, those of other processes of the program included.

    Raises:
        MeshError: unknown axis, a size below 1, or a product that is not the number of devices.
    """
    shape = dict(shape or {})
    if not shape and devices is None and jax.process_count() > 1:
        raise MeshError(f"mesh has no axes, but {jax.process_count()} processes share it; expected e.g. {{'fsdp': -1}}")
    devices = list(jax.devices() if devices is None else devices)
    if not shape:
        devices = devices[:1]
    for name, size in shape.items():
        if name not in MESH_AXES:
            raise MeshError(f"mesh has no axis {name!r}{did_you_mean(name, MESH_AXES)}")
        if size < 1 and size != -1:
            raise MeshError(f"mesh axis {name!r} has size {size}; expected 1 or more, or -1")
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
    sizes = [shape.get(name, 1) for name in MESH_AXES]
    grid = np.asarray(devices).reshape(sizes)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))


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
