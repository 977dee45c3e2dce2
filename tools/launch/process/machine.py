"""The machine of a launched process: its rank, its chips, its address, the lock that it left elsewhere, its slice.

GKE gives Pods that replace others the MEGASCALE_* of the lost ones at times; then libtpu waits for a slice that never
comes (https://github.com/ray-project/ray/pull/62893).
"""

import argparse
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

_CHIPS = re.compile(r"accel\d+|nvidia\d+|\d+")  # names of TPU chips and of GPUs in /dev, and in /dev/vfio


class MachineError(Exception):
    """A machine or a platform that is not as the arguments say; another machine may be."""


def rank(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Return the number of this process among those of all slices."""
    index = environment.get("JOB_COMPLETION_INDEX", environment.get("SLURM_PROCID", "0"))
    part = environment.get("AXL_SLICE", "0")
    if not index.isdecimal() or not part.isdecimal():
        raise MachineError(f"index of the process {index!r}, AXL_SLICE={part!r}: expected numbers")
    if int(index) >= arguments.hosts or int(part) >= arguments.slices:
        most = f"{arguments.slices} slices of {arguments.hosts} hosts"
        raise MachineError(f"slice {part}, host {index}: expected one of {most}")
    return int(part) * arguments.hosts + int(index)


def seen_chips(devices: Path = Path("/dev")) -> int:
    """Return the number of TPU chips or GPUs that this container has."""
    folders = (devices / "vfio", devices)
    for folder in folders:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        wanted = [name for name in names if _CHIPS.fullmatch(name) and (folder.name == "vfio" or name[0].isalpha())]
        if wanted:
            return len(wanted)
    return 0


def check_machine(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Return the rank (MachineError: this is no machine for the process)."""
    own = rank(arguments, environment)
    if arguments.chips and environment.get("JAX_PLATFORMS") != "cpu":
        given = environment.get("SLURM_STEP_GPUS", "")  # share of a machine that others may use, too
        found = len(given.split(",")) if given else seen_chips()
        if found != arguments.chips:
            raise MachineError(f"this machine shows {found} TPU chips or GPUs; expected {arguments.chips}")
    return own


def meeting_host(arguments: argparse.Namespace) -> str | None:
    """Return the host of the first process; None: they do not meet."""
    return arguments.meet.rpartition(":")[0] if arguments.meet else None


def release_lock(run_dir: Path, host: str) -> None:
    """Remove the lock of the run directory if an earlier container of this process left it, on another machine.

    A lock is honoured where its machine cannot be asked whether the owner lives. Here it is known to be gone: the
    platform starts a process again only when all of the old ones are. Locks of others are left alone.
    """
    lock, last = run_dir / "run.lock", run_dir / "launch" / "host"
    last.parent.mkdir(parents=True, exist_ok=True)
    try:
        owner = json.loads(lock.read_text())["host"]
    except (OSError, ValueError, KeyError):
        owner = None
    if owner is not None and owner != host and last.is_file() and owner == last.read_text():
        lock.unlink()
        print(f"axl: the run was on {owner}, and goes on here")
    last.write_text(host)


def own_address(environment: Mapping[str, str]) -> str:
    """Return the address of this machine in the cluster's network."""
    return environment.get("POD_IP") or socket.gethostbyname(socket.gethostname())


_SLICES, _SLICE, _COORDINATOR = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"


def corrected(environment: Mapping[str, str], slices: int, part: int, first: str | None) -> dict[str, str]:
    """Return the variables with those of slices as the process was started; what is not there is not added.

    Args:
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
