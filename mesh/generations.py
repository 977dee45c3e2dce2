"""TPU generations: peak figures of their chips, machines, names; and those that only their user knows of."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mesh.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Generation:
    """Peak figures of one kind of TPU, by its makers.

    Peak FLOP/s, HBM and DCN: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x). Links: the same pages state the sum
    of all links of a chip in both directions; what one link carries in one direction in practice is a tenth less, as
    in "How to Scale Your Model" (jax-ml.github.io/scaling-book, part 2), and those are the figures here.
    """

    name: str  # name in topologies
    chips: tuple[int, ...]  # chips of the largest slice, by dimension
    cores: int  # TensorCores of a chip
    counted: int  # units per chip that the number in a name like v5p-256 counts
    devices: int  # devices that jax shows per chip
    flops: float  # bfloat16 FLOP/s of a chip
    hbm: float  # bytes of a chip, as sold; what a program may use is less, and is asked of the compiler
    hbm_bandwidth: float  # bytes/s of a chip
    link: float  # bytes/s of one ICI link in one direction; a chip has two for each dimension
    dcn: float  # bytes/s of a chip, to other slices
    clock: float  # Hz, as follows from the peak and the size of the matrix units
    wrap: int  # a dimension closes to a ring when its length is a multiple of this
    largest_host: int = 4  # chips of the largest machine, which is a slice by itself
    host: int = 4  # chips of a machine of a slice with several
    shown: str = ""  # name by which jax shows a device; empty: "TPU" and the name
    described: str = ""  # description by its user; empty: it is in the table

    def per_device(self, chip_figure: float) -> float:
        """Return the share of one device in a figure of a chip."""
        return chip_figure / self.devices


_GIB = float(1 << 30)
GENERATIONS = {
    one.name: one
    for one in (
        Generation("v4", (12, 16, 16), 2, 2, 1, 275e12, 32 * _GIB, 1228e9, 45e9, 6.25e9, 1.05e9, 4),
        Generation("v5e", (16, 16), 1, 1, 1, 197e12, 16 * _GIB, 819e9, 45e9, 3.125e9, 1.5e9, 16, 8),
        Generation("v5p", (16, 20, 28), 2, 2, 1, 459e12, 95 * _GIB, 2765e9, 90e9, 6.25e9, 1.75e9, 4),
        Generation("v6e", (16, 16), 1, 1, 1, 918e12, 32 * _GIB, 1638e9, 90e9, 12.5e9, 1.75e9, 16, 8),
        Generation("tpu7x", (16, 24, 24), 2, 2, 2, 2307e12, 192 * _GIB, 7380e9, 90e9, 12.5e9, 2.2e9, 4, shown="TPU7x"),
    )
}
_ALIASES = {"v7x": "tpu7x", "v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "ironwood": "tpu7x"}
_NAME = re.compile(r"[a-z]+\d*[a-z]*")
# Properties of a generation that the table lacks -> default; None: to be given.
_FACTS: dict[str, float | str | None] = {"memory": None, "host": 4, "devices": 1, "shown": ""}


def find_generation(name: str) -> Generation | None:
    """Return a generation of the table by its name or another that it is sold under."""
    return GENERATIONS.get(_ALIASES.get(name, name))


def describe_generation(name: str, facts: Mapping[str, Any]) -> Generation:
    """Return a generation that the table lacks; it can be planned and run on, and no cost is estimated for it.

    Args:
        name: name of the generation, as in topologies.
        facts: `memory` of a chip in GiB; `host`, chips of a machine (4); `devices` that jax shows for a chip (1);
            `shown`, what jax calls a device ("TPU" and the name).

    Raises:
        UserError: it is in the table, a fact is missing or unknown, or is no number.
    """
    if _NAME.fullmatch(name) is None or find_generation(name) is not None:
        why = "is in the table" if find_generation(name) else "is no name of a generation, such as v9x"
        raise UserError(f"TPU generation {name!r} {why}; only another one can be described")
    for fact in facts:
        if fact not in _FACTS:
            raise UserError(f"TPU generation {name!r}: no fact {fact!r}{did_you_mean(fact, _FACTS)}")
    known = {fact: facts.get(fact, default) for fact, default in _FACTS.items()}
    memory, host, devices = (_number(name, fact, known[fact]) for fact in ("memory", "host", "devices"))
    if host != int(host) or devices != int(devices):
        raise UserError(f"TPU generation {name!r}: expected whole numbers of host={host:g} and devices={devices:g}")
    shown = str(known["shown"]).strip().lower().replace(" ", "-")
    if re.fullmatch(r"[\w.-]*", shown) is None:
        raise UserError(f"TPU generation {name!r}: expected shown as jax names a device, got {known['shown']!r}")
    text = f"memory={memory:g};host={int(host)};devices={int(devices)}" + (f";shown={shown}" if shown else "")
    unknown: dict[str, Any] = {"chips": (), "cores": 1, "counted": 1, **dict.fromkeys(_FIGURES, 0.0), "wrap": 1}
    machine: dict[str, Any] = {"largest_host": int(host), "host": int(host)}
    return Generation(name, devices=int(devices), hbm=memory * _GIB, shown=shown, described=text, **unknown, **machine)


_FIGURES = ("flops", "hbm_bandwidth", "link", "dcn", "clock")


def _number(name: str, fact: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = 0.0
    if not 0 < found < float("inf"):
        said = "" if value is None else f", got {value!r}"
        raise UserError(f"TPU generation {name!r}: expected {fact}=NUMBER{said}")
    return found


def generation_of(device: Any) -> Generation | None:
    """Return the generation of a jax device, by its kind; None for what is no TPU (or no longer sold)."""
    kind = str(device.device_kind).lower().removeprefix("tpu").strip()
    names = {"v4": "v4", "v5": "v5p", "v5p": "v5p", "v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v6e": "v6e"}
    return GENERATIONS.get("tpu7x" if kind in ("7x", "v7x") else names.get(kind, ""))
