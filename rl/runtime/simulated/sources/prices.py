"""Prices of a fleet: dollars an hour of its trainer and of each worker, by the price of a chip of each kind."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mesh import UserError, did_you_mean
from mesh.errors import once
from rl.fleet.devices import RoleDevices
from rl.fleet.fleet import Fleet
from rl.runtime.simulated.durations import Durations


def read_prices(edits: Sequence[str]) -> dict[str, float]:
    """Return dollars an hour by kind of chip, of edits such as `v5p=4.2` (UserError: another form, a kind twice)."""
    return once("--price", map(_read_price, edits))


def _read_price(edit: str) -> tuple[str, float]:
    kind, _, number = edit.partition("=")
    try:
        price = float(number)
    except ValueError:
        price = math.nan
    if not kind or not math.isfinite(price) or price < 0:
        raise UserError(f"--price {edit!r}: expected CHIP=DOLLARS an hour, such as v5p=4.2")
    return kind, price


def priced(durations: Durations, fleet: Fleet, prices: Mapping[str, float]) -> Durations:
    """Return durations with a fleet's prices, the trainer's with the reference's (UserError: a chip has none)."""
    dollars = {role: _price(role, devices, prices) for role, devices in _roles(fleet).items()}
    worker = dollars.pop("workers", 0.0)
    return dataclasses.replace(durations, trainer_price=sum(dollars.values()), worker_price=worker)


def check_prices(fleets: Sequence[Fleet], prices: Mapping[str, float]) -> None:
    """Refuse the price of a chip that no fleet has (UserError)."""
    known = sorted({devices.kind for fleet in fleets for devices in _roles(fleet).values()})
    for kind in prices:
        if kind not in known:
            near = did_you_mean(kind, known, limit=len(known))
            raise UserError(f"--price {kind}={prices[kind]:g}: no role is on such chips{near}")


def _roles(fleet: Fleet) -> dict[str, RoleDevices]:
    """Return the roles that have devices of their own."""
    found = {"trainer": fleet.trainer}
    found |= {} if fleet.together else {"workers": fleet.worker}
    return found if fleet.reference is None else found | {"reference": fleet.reference}


def _price(role: str, devices: RoleDevices, prices: Mapping[str, float]) -> float:
    if devices.kind not in prices:
        way = f"--price {devices.kind}=DOLLARS, of a chip for an hour"
        raise UserError(f"--price: {devices.text} ({role}) has no price; expected {way}")
    return devices.chips * devices.share * prices[devices.kind]
