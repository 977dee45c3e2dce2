"""The one named mesh on which everything runs."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import dataclasses
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


@dataclasses.dataclass(frozen=True, eq=False)
class PlaceholderDevice:
    """Description of a device that this process does not open, to check meshes without it; of a CPU by default."""

    platform: str = "cpu"
    device_kind: str = "cpu"
    memory: int | None = None  # bytes that the device says programs can use


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
        slices: slices of those sizes, the factors that go over slices (groups of devices that only the data centre's
            network joins): `{"data": 4}` for four slices, each of which has the rest of every axis. Their product is
            the number of slices. None or empty: there is one slice, or the first axis of `shape` goes over all of them.
            CPU devices are of no slice; in their order, equal parts of them stand for as many slices as are asked for.

    Raises:
        MeshError: unknown axis, a size below 1, or a product that is not the number of devices or of slices.
    """
    shape, slices = dict(shape or {}), dict(slices or {})
    if not shape and devices is None and jax.process_count() > 1:
        raise MeshError(f"mesh has no axes, but {jax.process_count()} processes share it; expected e.g. {{'fsdp': -1}}")
    devices = list(jax.devices() if devices is None else devices)
    if not shape:
        devices = devices[:1]
    _check_names(shape, "mesh")
    _check_names(slices, "slices")
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
    groups = _groups(devices, slices)
    over = _over_slices(shape, len(groups), slices)
    sizes, outer = ([of.get(name, 1) for name in MESH_AXES] for of in (shape, over))
    return Mesh(_lay_out(sizes, groups, outer), MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))


def _check_names(shape: Mapping[str, int], what: str) -> None:
    for name, size in shape.items():
        if name not in MESH_AXES:
            raise MeshError(f"{what} has no axis {name!r}{did_you_mean(name, MESH_AXES)}")
        if size < 1 and (size != -1 or what == "slices"):
            free = "" if what == "slices" else ", or -1"
            raise MeshError(f"{what} axis {name!r} has size {size}; expected 1 or more{free}")


def _groups(devices: Sequence[Any], slices: Mapping[str, int]) -> list[list[Any]]:
    """Return the devices of each slice."""
    asked = math.prod(slices.values())
    if devices[0].platform == "cpu" and len(devices) % asked == 0:
        each = len(devices) // asked
        return [list(devices[at : at + each]) for at in range(0, len(devices), each)]
    found: dict[int, list[Any]] = {}
    for device in devices:
        found.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [found[index] for index in sorted(found)]


def _over_slices(shape: Mapping[str, int], count: int, slices: Mapping[str, int]) -> dict[str, int]:
    """Return the factor of each axis that goes over `count` slices."""
    over = dict(slices)
    if not slices and count > 1:
        over = {next((name for name in MESH_AXES if shape.get(name, 1) > 1), "data"): count}
    if math.prod(over.values()) != count:
        total, there = math.prod(over.values()), "there is 1" if count == 1 else f"there are {count}"
        raise MeshError(f"slices {_describe(over)} is for {total} slices but {there}")
    for name, factor in over.items():
        if (size := shape.get(name, 1)) % factor:
            if slices:
                raise MeshError(f"mesh axis {name!r} has size {size}, no multiple of slices.{name}={factor}")
            raise MeshError(
                f"mesh axis {name!r}, the first, has size {size}, which does not divide over {count} slices; expected "
                f"a multiple of {count}, or `slices` to say which axes go over them, as in slices={{'data': {count}}}"
            )
    return over


def _lay_out(sizes: Sequence[int], groups: Sequence[Sequence[Any]], outer: Sequence[int]) -> np.ndarray:
    """Lay out each slice by itself, and the slices along the axes that go over them, outermost."""
    inner = [size // factor for size, factor in zip(sizes, outer, strict=True)]
    grids = np.stack([_one_slice(inner, group) for group in groups]).reshape([*outer, *inner])
    count = len(sizes)
    return grids.transpose([place for axis in range(count) for place in (axis, count + axis)]).reshape(sizes)


def _one_slice(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1 and not isinstance(devices[0], PlaceholderDevice):
        with contextlib.suppress(NotImplementedError):  # no partition of the torus has these sizes
            return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(sizes)


def _describe(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in shape.items())


def _nearest(shape: Mapping[str, int], count: int) -> str:
    """Return the nearest shape that fits: data or fsdp, which shard rows, take what the other axes leave."""
    free = next((name for name in ("data", "fsdp") if name in shape), "fsdp")
    kept = {name: size for name, size in shape.items() if name != free}
    rest, over = divmod(count, math.prod(kept.values()))
    fit = {free: count} if over else {**kept, free: rest}
    return f"{_describe({name: fit[name] for name in MESH_AXES if name in fit})} would fit"
