"""Address of a run's Ray cluster, in the run directory while the run is active, for elastic workers.

It is read before Ray is imported, because Ray reads its token from the environment at that time.
"""

import json
import os
from pathlib import Path

from axlearn_like.config.consent import check_consent, note_text, remember_consent
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from mesh.distributed import is_loopback

NODES_VARIABLE = "AXL_RAY_NODES"  # the number of nodes that a launched run waits for


def advertise(run: RunDirectory, address: str, namespace: str) -> None:
    """Write the file, readable by this user only: the token in it lets its reader run code in the cluster.

    A launched run is in storage that others may read, and each of its processes has the token already: it stays out.
    """
    path, token = cluster_path(run), os.environ.get("RAY_AUTH_TOKEN")
    if NODES_VARIABLE in os.environ:
        token = None
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        json.dump({"address": address, "namespace": namespace, "token": token}, file)
    os.replace(temporary, path)
    if NODES_VARIABLE not in os.environ:
        remember_consent(_reached(address))


def withdraw(run: RunDirectory) -> None:
    """Remove the file: the run is over, or stopped."""
    cluster_path(run).unlink(missing_ok=True)


def read_cluster(run: RunDirectory) -> dict[str, str]:
    """Return `address` and `namespace` of the active run, and set Ray's token in the environment if it has one.

    A Ray cluster can run code in the processes that join it. So one on another machine is joined
    only if a run of this user has told of it, or by consent; a launched run's storage is trusted as a whole.

    Raises:
        UserError: no run is active there, or its cluster is elsewhere and not allowed.
    """
    if not run.config_path.is_file():
        raise UserError(f"{run.path} is not a run directory: it has no config.txt")
    try:
        cluster = json.loads(cluster_path(run).read_text())
    except FileNotFoundError:
        raise UserError(
            f"no run under Ray is active in {run.path} (it has no {cluster_path(run).name}); "
            "start or resume it with `axl rl`, then join"
        ) from None
    if NODES_VARIABLE not in os.environ:
        note_text(_reached(cluster["address"]))
        check_consent(_reached(cluster["address"]), str(cluster_path(run)))
    if (token := cluster.pop("token")) is not None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return cluster


def _reached(address: str) -> list[str]:
    host = address.rpartition(":")[0].strip("[]")
    return [] if is_loopback(host) else [f"ray:{address}"]


def cluster_path(run: RunDirectory) -> Path:
    """Return the path of the file, which exists while the run is active."""
    return run.path / "cluster.json"
