"""Variables by which a platform joins slices: those that are left of an earlier attempt are corrected.

GKE gives Pods that replace others the MEGASCALE_* of the lost ones at times; then libtpu waits for a slice that never
comes (https://github.com/ray-project/ray/pull/62893).
"""

from collections.abc import Mapping

_SLICES, _SLICE, _COORDINATOR = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"


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


def _same_host(one: str, other: str) -> bool:
    """Return False if two names are of different hosts; an address and a name are not compared."""
    if _is_address(one) != _is_address(other):
        return True
    return one == other if _is_address(one) else one.partition(".")[0] == other.partition(".")[0]


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdecimal()
