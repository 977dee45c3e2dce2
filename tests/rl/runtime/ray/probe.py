"""An actor that says what it sees of its devices; its process imports no more than it needs."""

import os

import ray

from rl.fleet.processes import prepare_process
from rl.fleet.requests import RoleRequest


class Probe:
    """The view of a process of a role before it opens its devices."""

    def __init__(self, request: RoleRequest, variables: dict[str, str]):
        """Set variables as RoleActor does, then those that it makes of the request."""
        os.environ |= variables
        prepare_process(request)

    def seen(self) -> dict[str, str]:
        """Return the variables of devices, the address of the host and the pid."""
        kept = ("CUDA_VISIBLE", "TPU_", "XLA_", "JAX_")
        found = {name: value for name, value in os.environ.items() if name.startswith(kept)}
        return {**found, "host": ray.util.get_node_ip_address(), "pid": str(os.getpid())}
