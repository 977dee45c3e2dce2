"""Variables of a platform about a process, compared with its arguments: values of an earlier attempt are corrected.

GKE gives Pods that replace others the MEGASCALE_* of the lost ones at times; then libtpu waits for a slice that never
comes (https://github.com/ray-project/ray/pull/62893). They are read as jax's own detection reads them
(jax/_src/clusters/cloud_tpu_cluster.py).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

_SLICES, _SLICE, _COORDINATOR = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"
_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


@dataclasses.dataclass(frozen=True)
class Standing:
    """Place of a process in a program; None: not said.

    Attributes:
        index: among the processes of all slices.
        count: number of processes.
        first: host of the first one.
    """

    index: int | None = None
    count: int | None = None
    first: str | None = None


def platform_standing(environment: Mapping[str, str], hosts: int) -> Standing:
    """Return what the platform's variables say; `hosts`: of a slice, where they do not."""
    listed = _listed(environment)
    slices, part, index = (_number(environment, name) for name in (_SLICES, _SLICE, "TPU_WORKER_ID"))
    each = len(listed) or hosts
    first = environment.get(_COORDINATOR, "") or (listed[0] if listed else "")
    return Standing(
        None if index is None else index + (part or 0) * each,
        len(listed) * (slices or 1) if listed else None,
        first.partition(":")[0] or None,
    )


def differences(own: Standing, theirs: Standing) -> list[str]:
    """Return a line for everything in which the platform differs; what the process was started with counts."""
    found: list[str] = []
    if theirs.index is not None and theirs.index != own.index:
        found.append(
            f"this is process {own.index} by its index, and {theirs.index} by the platform's variables; "
            f"{own.index} counts"
        )
    if theirs.count is not None and theirs.count != own.count:
        found.append(
            f"there are {own.count} processes, and {theirs.count} by the platform's variables; {own.count} count"
        )
    if own.first is not None and theirs.first is not None and not _same_host(own.first, theirs.first):
        found.append(f"the first process is on {own.first}, and on {theirs.first} by the platform's variables")
    return found


def corrected(environment: Mapping[str, str], slices: int, part: int, first: str | None) -> dict[str, str]:
    """Return the variables with those of slices as the process was started; what is not there is not added.

    Args:
        environment: the variables.
        slices: slices of the program.
        part: number of this slice.
        first: host of the first process; None: not known.
    """
    found = dict(environment)
    if slices == 1:
        return {name: value for name, value in found.items() if not name.startswith("MEGASCALE_")}
    known = {_SLICES: str(slices), _SLICE: str(part)}
    found |= {name: value for name, value in known.items() if name in found}
    there, colon, port = found.get(_COORDINATOR, "").partition(":")
    if there and first is not None and not _same_host(first, there):
        found[_COORDINATOR] = f"{first}{colon}{port}"
    return found


def _listed(environment: Mapping[str, str]) -> list[str]:
    """Return the hosts of this slice, in their order."""
    path = environment.get("TPU_PROCESS_ADDRESSES_PATH", "")
    if path and Path(path).is_file():
        text = Path(path).read_text(encoding="utf-8")
    else:
        text = next((environment[name] for name in _LISTS if environment.get(name)), "")
    return [word for word in text.strip().split(",") if word]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _same_host(one: str, other: str) -> bool:
    """Return False if two names are of different hosts; an address and a name are not compared."""
    if _is_address(one) != _is_address(other):
        return True
    return one == other if _is_address(one) else one.partition(".")[0] == other.partition(".")[0]


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdecimal()
