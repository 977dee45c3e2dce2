"""Placement of experts as data: a table layer x slot -> expert, and which share of an expert's rows each slot takes.

A device computes a few *slots*, each with a copy of one expert; a popular expert has several copies (*replicas*), on
different devices. Everything is a function of counts that all devices know, without random numbers, so all compute the
same plan without talking to each other.
"""

import dataclasses
from typing import Any

import numpy as np

from mesh.errors import UserError

WHOLE = 4096  # parts of an expert's rows that its slots share: a power of two, for exact arithmetic on devices

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Domains:
    """Devices that compute experts, grouped by what fails at once.

    Attributes:
        count: domains, as hosts or slices.
        devices: devices of a domain.
        slots: slots of a device.
    """

    count: int
    devices: int
    slots: int

    @property
    def all_slots(self) -> int:
        """The slots of all devices."""
        return self.count * self.devices * self.slots

    def check(self, num_experts: int, field: str = "replicas") -> None:
        """Refuse too few slots (UserError)."""
        if self.all_slots < num_experts:
            raise UserError(
                f"{field}: {self.all_slots} slots ({self.count * self.devices} devices with {self.slots} each) for "
                f"{num_experts} experts; expected {-(-num_experts // (self.count * self.devices))} or more on each"
            )


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """The places of experts. Slots are numbered device by device.

    Attributes:
        experts: int32 [layers, slots], the expert of each slot.
        ends: int32 [layers, slots], the end of the slot's part of its expert's rows, in `WHOLE`ths; the part begins
            where that of the expert's slot before ends, and the last one ends at `WHOLE`.
        devices: number of devices.
        threshold: domains that each expert is in, or more; lower than asked for where slots or domains are few.
    """

    experts: Array
    ends: Array
    devices: int
    threshold: int = 1

    def check(self, layers: int, num_experts: int, slots: int) -> None:
        """Refuse a plan of another model, or for other devices (UserError)."""
        if self.experts.shape != (layers, slots):
            raise UserError(
                f"plan: a table of {self.experts.shape[0]} layers and {self.experts.shape[1]} slots; expected {layers} "
                f"layers and {slots} slots, those of this model on this mesh"
            )
        for layer, row in enumerate(self.experts):
            if not np.array_equal(np.unique(row), np.arange(num_experts)):
                raise UserError(f"plan: layer {layer} has not the experts 0 to {num_experts - 1}; expected all of them")

    def replicas(self, num_experts: int) -> Array:
        """Return int [layers, experts], the slots of each expert."""
        return np.stack([np.bincount(row, minlength=num_experts) for row in self.experts])

    def device_loads(self, loads: Array) -> Array:
        """Return float64 [layers, devices] of loads [layers, experts]: the rows that each device takes."""
        shares = slot_shares(self.experts, self.ends) / WHOLE
        taken = np.take_along_axis(np.asarray(loads, np.float64), self.experts, axis=1) * shares
        return taken.reshape(len(taken), self.devices, -1).sum(axis=2)

    def busiest_to_mean(self, loads: Array) -> float:
        """Return the load of the busiest device over the mean, in the worst layer; 1 without any load."""
        found = self.device_loads(loads)
        mean = found.mean(axis=1)
        return float(np.max(np.where(mean > 0, found.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)))


def slot_shares(experts: Array, ends: Array) -> Array:
    """Return int [layers, slots], the parts in `WHOLE`ths, of a plan's arrays."""
    order = np.argsort(experts, axis=1, kind="stable")
    sorted_experts, sorted_ends = (np.take_along_axis(a, order, axis=1) for a in (experts, ends))
    before = np.pad(sorted_ends, ((0, 0), (1, 0)))[:, :-1]
    same = np.pad(sorted_experts[:, 1:] == sorted_experts[:, :-1], ((0, 0), (1, 0)))
    shares = np.empty_like(ends)
    np.put_along_axis(shares, order, sorted_ends - np.where(same, before, 0), axis=1)
    return shares
