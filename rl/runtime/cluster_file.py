"""Address of a run's Ray cluster, in the run directory while the run is active, for elastic workers.

It is read before Ray is imported, because Ray reads its token from the environment at that time.
"""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from axlearn_like.config.consent import check_consent, note_text, remember_consent
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from mesh.distributed import is_loopback
from mesh.files.written import replace_file

_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}", re.ASCII)
_LONGEST = 1 << 16  # characters of the file
NODES_VARIABLE = "AXL_RAY_NODES"  # the number of nodes that a launched run waits for


def advertise(run: RunDirectory, address: str, namespace: str) -> None:
    """Write the file, readable by this user only: the token in it lets its reader run code in the cluster.

    A launched run is in storage that others may read, and each of its processes has the token already: it stays out.
    """
    path, token = cluster_path(run), os.environ.get("RAY_AUTH_TOKEN")
    if NODES_VARIABLE in os.environ:
        token = None
    replace_file(path, json.dumps({"address": address, "namespace": namespace, "token": token}))
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
        UserError: no run is active there, or its cluster is elsewhere and not allowed, or the file is not one of ours.
    """
    if not run.config_path.is_file():
        raise UserError(f"{run.path} is not a run directory: it has no config.txt")
    path = cluster_path(run)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if NODES_VARIABLE not in os.environ:
                _check_owner(path, os.fstat(file.fileno()))
            cluster = _parsed(path, file.read(_LONGEST))
    except FileNotFoundError:
        raise UserError(
            f"no run under Ray is active in {run.path} (it has no {cluster_path(run).name}); "
            "start or resume it with `axl rl`, then join"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if NODES_VARIABLE not in os.environ:
        note_text(_reached(cluster["address"]))
        check_consent(_reached(cluster["address"]), str(path))
    if (token := cluster.pop("token")) is not None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return cluster


def _check_owner(path: Path, facts: os.stat_result) -> None:
    """Refuse a file that another user may have written: its cluster could be theirs, on this machine (UserError)."""
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & 0o022:
        raise UserError(
            f"{path} is of user {facts.st_uid}, with mode {facts.st_mode & 0o777:03o}; expected a file that you or "
            "root alone can write, as `axl rl` makes it, for the cluster that it names can run code here"
        )


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """Return the cluster that a file names (UserError: it names none)."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = {name: json.loads(text)[name] for name in ("address", "namespace", "token")}
        texts = isinstance(found["namespace"], str) and (found["token"] is None or found["token"].isprintable())
        if texts and _ADDRESS.fullmatch(found["address"]):
            return found
    raise UserError(f"{path}: expected JSON with address (HOST:PORT), namespace and token, as `axl rl` writes it")


def _reached(address: str) -> list[str]:
    host = address.rpartition(":")[0].strip("[]")
    return [] if is_loopback(host) else [f"ray:{address}"]


def cluster_path(run: RunDirectory) -> Path:
    """Return the path of the file, which exists while the run is active."""
    return run.path / "cluster.json"
