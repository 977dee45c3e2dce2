"""A process of a role before it opens its devices, and after: bounds of a part of a TPU host; a check of both."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mesh import UserError
from rl.fleet.requests import RoleRequest

VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"  # set by the scheduler where a process has a part of the host's chips
# Ray sets these for one and two chips, by their old names; libtpu takes the new ones first.
_OLD_BOUNDS = ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
_PORT = 8476  # port of libtpu; a part of a host adds the number of its first chip


def prepare_process(request: RoleRequest) -> None:
    """Set what libtpu must know before it is opened (UserError: the chips that the scheduler gave are no slice)."""
    if request.topology is not None and request.processes == 1 and VISIBLE_CHIPS in os.environ:
        for name in _OLD_BOUNDS:
            os.environ.pop(name, None)
        os.environ |= chip_bounds(request, os.environ)


def chip_bounds(request: RoleRequest, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which libtpu takes a part of a host's chips for a slice of its own.

    jax._src.test_multiprocess starts processes so; see also https://github.com/jax-ml/jax/issues/14977. Chips of a
    host are numbered along the first dimension, so a slice of 1, 4 or 8 has chips that follow each other, and the
    number of its first is a multiple of their number.

    Raises:
        UserError: the visible chips do not.
    """
    assert request.topology is not None
    shape: Sequence[int] = request.topology.shape
    chips = sorted(int(chip) for chip in environment[VISIBLE_CHIPS].split(","))
    count = int(request.each)
    if chips != list(range(chips[0], chips[0] + count)) or chips[0] % count:
        raise UserError(
            f"{request.role} needs {request.topology.name}, {count} chips side by side, and the scheduler gave it "
            f"chips {', '.join(map(str, chips))} of its host; does something else use a part of that host?"
        )
    port = _PORT + chips[0]
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ",".join(map(str, (*shape, 1)[:3])),
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu's lock is per host, not per chip
    }


def check_opened(request: RoleRequest, found: Sequence[Any]) -> None:
    """Check that this process shows the fleet's devices (UserError): jax falls back to CPUs with a warning only."""
    rehearsal = os.environ.get("JAX_PLATFORMS") == "cpu"
    platform = "cpu" if rehearsal else request.kind.lower()
    if found[0].platform == platform and len(found) == (request.devices or len(found)):
        return
    raise UserError(
        f"{request.role} expected {request.devices} {platform} devices in a process, as fleet says, and jax shows "
        f"{len(found)} x {found[0].device_kind}; is jax installed there with support for them (jax[cuda13], jax[tpu])?"
    )
