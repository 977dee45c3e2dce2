"""Several processes as one JAX program: how they meet, and what they agree on while they run.

jax.distributed ends the process (SIGABRT) when others do not come in time. So the processes meet on a socket of ours
first, at the address of its coordinator, and jax.distributed starts only when all are there.

Afterwards decisions travel through the key-value service of jax.distributed. A broadcast over the devices
(`jax.experimental.multihost_utils`) would need values of one shape, queue behind the work of the devices, and block
for ever, without a message, on a process that is gone. The service takes a third of a millisecond, and waits for it
can be reported.
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import ipaddress
import itertools
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax

from mesh.errors import UserError
from mesh.programs.compilation import cache_programs_of_every_process
from mesh.programs.jax_internals import coordination

_GO = b"go"
_HELLO = 5.0  # seconds for a new connection to say which process it is
_CONNECT = 60  # seconds for jax.distributed, when all are known to be there
_POLL = 1.0  # seconds between two looks at a wait that goes on
_groups = itertools.count()  # several may follow each other in one process, in the same order in all

OnWait = Callable[[str, float], None]


def free_address(host: str = "127.0.0.1") -> str:
    """Return `host:port` with a port that is free there now."""
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Return True if an address or name of a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def process_name(role: str, index: int) -> str:
    """Return the name of a process; the first has the role's own: "trainer", "trainer-1", "trainer-2" ..."""
    return f"{role}-{index}" if index else role


def join(
    address: str, index: int, count: int, *, role: str = "process", timeout: float = 300.0, heartbeat: float = 100.0
) -> None:
    """Become process `index` of a program of `count`; before the devices are first used.

    Args:
        address: `host:port` of the first process, where nothing listens yet; it listens there and nowhere else.
        index: index of this process, from 0.
        count: number of processes.
        role: the name that they share; see `process_name`.
        timeout: seconds for all to come.
        heartbeat: seconds without a sign of life after which a process counts as dead, and all others end.

    Raises:
        UserError: a process did not come, or the address cannot be reached; the message names it.
    """
    rendezvous(address, index, count, role, timeout)
    cache_programs_of_every_process()
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


def rendezvous(address: str, index: int, count: int, role: str, timeout: float) -> None:
    """Return when all processes have come to the address.

    Raises:
        UserError: they did not within `timeout` seconds; the message names them.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if index:
        _go_to((host, int(port)), index, role, deadline, timeout)
    else:
        _receive((host, int(port)), count, role, deadline, timeout)


def _receive(place: tuple[str, int], count: int, role: str, deadline: float, timeout: float) -> None:
    missing = set(range(1, count))
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(place))
        connections: list[socket.socket] = []
        while missing:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                names = ", ".join(process_name(role, other) for other in sorted(missing))
                raise UserError(f"{role} has waited {timeout:.0f} s for {names} to come to {_text(place)}") from None
            if (other := _read_index(connection)) in missing:
                missing.remove(other)
                connections.append(connection)
        for connection in connections:
            connection.sendall(_GO)


def _read_index(connection: socket.socket) -> int | None:
    """Return the index that the other side sends; None for a stranger."""
    connection.settimeout(_HELLO)
    try:
        return int(connection.recv(16))
    except (OSError, ValueError):
        return None


def _go_to(place: tuple[str, int], index: int, role: str, deadline: float, timeout: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=left) as connection:
                connection.sendall(str(index).encode())
                connection.settimeout(left)
                if connection.recv(16) == _GO:
                    return
        except OSError:
            pass  # the first process is not there yet, or has started again
        time.sleep(0.1)
    raise UserError(
        f"{process_name(role, index)} has waited {timeout:.0f} s at {_text(place)} for {role} and the others; "
        "can that address be reached from its machine?"
    )


def _text(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


class ProcessGroup:
    """The processes of one program, as one of them sees them; a group of one sends nothing and costs nothing.

    They run the same code over one mesh and must take the same turns: all must make the same calls in the same order.
    """

    def __init__(
        self, role: str = "process", *, on_wait: OnWait | None = None, warn_after: float = 30.0, limit: float = 3600.0
    ):
        """Join the group of this program.

        Args:
            role: the name that they share; see `process_name`.
            on_wait: called as `on_wait(name, seconds)` for a process that this one waits for, after `warn_after`
                seconds and whenever the wait has doubled.
            warn_after: seconds before the first of these calls.
            limit: seconds after which a wait is an error.
        """
        self._role, self._on_wait, self._warn_after, self._limit = role, on_wait, warn_after, limit
        self._client, self.index, self.count = coordination()
        self.name = process_name(role, self.index)  # name of this process
        self._prefix = f"agreed/{next(_groups)}"
        self._turns = itertools.count()
        self._own_keys: list[str] = []  # keys that this process has written

    @property
    def leader(self) -> bool:
        """True in the first process, which writes and speaks for all."""
        return self.index == 0

    def broadcast(self, value: Any) -> Any:
        """Return the leader's value in all processes; it must be small, and JSON must hold it."""
        if self.count == 1:
            return value
        key = self._next_key()
        if self.leader:
            self._put(key, value)
            return value
        return self._get(key, source=0)

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in at least one process, once all have called this."""
        return any(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order, in each of them; small, and JSON must hold them."""
        if self.count == 1:
            return [value]
        key, former = self._next_key(), len(self._own_keys)
        values = [value]
        if self.leader:
            values += [self._get(f"{key}/{other}", source=other) for other in range(1, self.count)]
        else:
            self._put(f"{key}/{self.index}", value)
        values = self.broadcast(values)
        for key in self._own_keys[:former]:  # all are here, so all have read what was written before
            self._client.key_value_delete(key)
        del self._own_keys[:former]
        return values

    def barrier(self) -> None:
        """Return once all processes have called this."""
        self.any(False)

    def _next_key(self) -> str:
        return f"{self._prefix}/{next(self._turns)}"

    def _put(self, key: str, value: Any) -> None:
        self._own_keys.append(key)
        self._client.key_value_set(key, json.dumps(value))

    def _get(self, key: str, source: int) -> Any:
        began, warn_at = time.monotonic(), self._warn_after
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(1000 * _POLL)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            seconds, other = time.monotonic() - began, process_name(self._role, source)
            if seconds > self._limit:
                raise TimeoutError(f"{self.name} has waited {seconds:.0f} s for {other}, to go on together")
            if seconds > warn_at and self._on_wait is not None:
                warn_at = 2 * seconds
                self._on_wait(other, seconds)
