"""Preflight checks, before a run starts its processes: enough memory, a free port, a reachable address.

They come first of all, so that a run which would fail after its warm start does not begin.
"""

import os
import socket
import time
from collections.abc import Sequence

import psutil

from mesh import UserError
from mesh.distributed import is_loopback
from rl.experiment import RLExperiment
from rl.runtime.cluster_file import NODES_VARIABLE

MEMORY_VARIABLE = "AXL_RAY_MEMORY_GIB"
_CLUSTER_TIMEOUT = 5.0  # seconds
_STARTS = 600.0
_POLL = 0.1


def check_machine(cfg: RLExperiment.Config) -> None:
    """Check memory and the server's port or, of a cluster, that it is there (UserError: names what is missing)."""
    if address := os.environ.get("RAY_ADDRESS"):
        # The head of a launched run starts Ray beside this process, and ends it if Ray does not start.
        check_cluster(address, wait=_STARTS if NODES_VARIABLE in os.environ else 0.0)
    else:
        others = cfg.trainer.processes + cfg.fleet.reference_hosts
        check_memory(cfg.workers * cfg.fleet.worker_hosts, psutil.virtual_memory().available, others)
        for shard in range(cfg.parameter_server.shard_servers):
            check_port(cfg.parameter_server.host, cfg.parameter_server.port and cfg.parameter_server.port + shard)


def check_cluster(address: str, wait: float = 0.0) -> None:
    """Check that a Ray cluster answers within `wait` seconds: Ray itself would try for many minutes (UserError)."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return None  # a name that Ray resolves, such as `auto`
    deadline = time.monotonic() + wait
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=_CLUSTER_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL)
                continue
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"no Ray cluster answers at RAY_ADDRESS={address}: {reason}; start one there (`ray start --head`), or "
                "unset RAY_ADDRESS to run on this machine alone"
            ) from error


def check_memory(workers: int, available: int, trainers: int = 1) -> None:
    """Check memory for Ray and the roles, by estimate or AXL_RAY_MEMORY_GIB (UserError: there is too little)."""
    needed = needed_memory(workers, trainers)
    if available < needed:
        raise UserError(
            f"not enough free memory to start Ray with {workers} rollout workers: {available / 2**30:.1f} GiB "
            f"available, {needed / 2**30:.1f} GiB needed; close something, or use fewer workers or "
            f"--runtime inprocess ({MEMORY_VARIABLE} sets another estimate)"
        )


def needed_memory(workers: int, trainers: int = 1) -> int:
    """Return the bytes that these processes need, by estimate or by `AXL_RAY_MEMORY_GIB`."""
    text = os.environ.get(MEMORY_VARIABLE)
    if text is None:
        return (5 << 28) + (workers + trainers) * (3 << 27)
    try:
        return int(float(text) * 2**30)
    except ValueError:
        raise UserError(f"{MEMORY_VARIABLE}={text!r}: expected a number of GiB, such as 2.5") from None


def check_port(host: str, port: int) -> None:
    """Check that the parameter server can listen at this address; port 0 is always free (UserError: it cannot)."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"parameter server cannot listen on {host}:{port} "
                f"(parameter_server.host, parameter_server.port): {reason}; "
                "set parameter_server.port=0 for any free port"
            ) from error


def check_reachable(host: str, nodes: Sequence[str]) -> None:
    """Check that roles on all nodes of a cluster can reach a parameter server that listens on `host`.

    `nodes`: the addresses of the nodes. All loopback addresses are one machine.

    Raises:
        UserError: it listens on loopback, and the cluster has several machines.
    """
    machines = {"loopback" if is_loopback(address) else address for address in nodes}
    if is_loopback(host) and len(machines) > 1:
        raise UserError(
            f"parameter_server.host={host!r}: the cluster has nodes on several hosts "
            f"({', '.join(sorted(set(nodes)))}), and roles on other hosts could not reach the parameter "
            "server; set parameter_server.host=0.0.0.0 (and parameter_server.tls where others share the network)"
        )
