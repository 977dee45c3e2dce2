"""How fast the members of a group of devices exchange data, from their places in the torus."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from mesh.topology import Topology

_ON_CHIP = 6.0  # the two chiplets of tpu7x, as a multiple of one ICI link (cloud.google.com/tpu/docs/tpu7x)


class Bandwidth(NamedTuple):
    """The bandwidth of one device in a collective of its group.

    Attributes:
        rate: bytes/s that it can receive, all directions together.
        longest: members in a row along one dimension.
    """

    rate: float
    longest: int


def group_bandwidth(mesh: Mesh, topology: Topology, axes: Sequence[str], *, dcn: bool) -> Bandwidth:
    """Return the bandwidth of the groups along `axes`, or between slices (`dcn`).

    A dimension of the torus that a group fills from end to end, and that closes to a ring, gives both of its links;
    an open one gives one of them, which is what its ends have. Groups that are no box count as one open dimension.
    """
    generation = topology.generation
    if dcn:
        return Bandwidth(generation.per_device(generation.dcn), 1)
    members = _group(mesh, axes)
    places = np.array([_place(device) for device in members])
    lengths = [len(set(places[:, dimension].tolist())) for dimension in range(places.shape[1])]
    chips = len({tuple(place) for place in places.tolist()})
    if chips == 1:
        return Bandwidth(_ON_CHIP * generation.link, 1)
    shared = generation.devices if chips == len(members) else 1  # do both devices of a chip use its links?
    if math.prod(lengths) != chips:
        return Bandwidth(generation.link / shared, max(lengths))
    links = 0
    for dimension, length in enumerate(lengths):
        if length > 1:
            full = dimension < len(topology.shape) and length == topology.shape[dimension]
            links += 2 if full and length > 2 and length % generation.wrap == 0 else 1
    return Bandwidth(links * generation.link / shared, max(lengths))


def _group(mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """Return the members of the group of the first device."""
    place = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    members = list(np.asarray(mesh.devices[place], dtype=object).reshape(-1))
    first = getattr(members[0], "slice_index", None)
    return [device for device in members if getattr(device, "slice_index", None) == first]


def _place(device: Any) -> tuple[int, ...]:
    return tuple(getattr(device, "coords", None) or (device.id, 0, 0))
