"""How processes become one program: jax.distributed, with an end to every wait, and a name for who did not come.

jax.distributed ends the process (SIGABRT) when others do not come in time. So they meet first on a socket of ours, at
the address that it will have, and only when all are there is it asked.
"""

import socket
import time
from contextlib import ExitStack

import jax

from mesh.errors import UserError
from mesh.processes import process_name

_GO = b"go"
_HELLO = 5.0  # seconds for who has connected to say who it is
_CONNECT = 60  # seconds for jax.distributed, when all are known to be there


def free_address(host: str = "127.0.0.1") -> str:
    """`host:port` with a port that is free there now."""
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def join(
    address: str, index: int, count: int, *, role: str = "process", timeout: float = 300.0, heartbeat: float = 100.0
) -> None:
    """Become process `index` of a program of `count`; before the devices are first used.

    Args:
        address: `host:port` of the first process, where nothing listens yet; it listens there and nowhere else.
        role: what they are together; see `process_name`.
        timeout: seconds for all to come.
        heartbeat: seconds without a sign of life after which a process counts as dead, and all others end.

    Raises:
        UserError: names who has not come, or cannot be reached.
    """
    meet(address, index, count, role, timeout)
    # It would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        count,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=_CONNECT,
        heartbeat_timeout_seconds=int(heartbeat),
        coordinator_bind_address=address,
    )


def meet(address: str, index: int, count: int, role: str, timeout: float) -> None:
    """Return when all processes are there.

    Raises:
        UserError: they are not within `timeout` seconds.
    """
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + timeout
    if index:
        _go_to((host, int(port)), index, role, give_up, timeout)
    else:
        _receive((host, int(port)), count, role, give_up, timeout)


def _receive(place: tuple[str, int], count: int, role: str, give_up: float, timeout: float) -> None:
    missing = set(range(1, count))
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(place))
        links = []
        while missing:
            server.settimeout(max(give_up - time.monotonic(), 0.001))
            try:
                link = stack.enter_context(server.accept()[0])
            except TimeoutError:
                names = ", ".join(process_name(role, other) for other in sorted(missing))
                raise UserError(f"{role} has waited {timeout:.0f} s for {names} to come to {_text(place)}") from None
            if (other := _who(link)) in missing:
                missing.remove(other)
                links.append(link)
        for link in links:
            link.sendall(_GO)


def _who(link: socket.socket) -> int | None:
    link.settimeout(_HELLO)
    try:
        return int(link.recv(16))
    except (OSError, ValueError):
        return None  # not one of us


def _go_to(place: tuple[str, int], index: int, role: str, give_up: float, timeout: float) -> None:
    while (left := give_up - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=left) as link:
                link.sendall(str(index).encode())
                link.settimeout(left)
                if link.recv(16) == _GO:
                    return
        except OSError:
            pass  # not there yet, or there once more
        time.sleep(0.1)
    raise UserError(
        f"{process_name(role, index)} has waited {timeout:.0f} s at {_text(place)} for {role} and the others; "
        "can that address be reached from its machine?"
    )


def _text(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"
