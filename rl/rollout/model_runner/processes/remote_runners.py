"""The leader's side of an engine that spans processes: every call goes to all remote runners, in one order.

The leader has the scheduler. It sends each call with its small batch before it makes the call itself, and does not wait
for an answer: the processes meet in the collectives of the dispatch. Messages and connections are those of the
parameter server (authenticated by the run's token, TLS where that has it).
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax

from mesh.distributed import ProcessGroup, process_name
from rl.parameter_server.transport.buffers import view_of
from rl.parameter_server.transport.client import RpcClient, Unreachable
from rl.parameter_server.transport.connection import ERROR, REQUEST, Connection, TransportError, encode_header
from rl.parameter_server.transport.connection_pool import ConnectionPool
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.tls import Tls
from rl.rollout.model_runner.processes.calls import RunnerCall, to_message

_CONNECT = 30.0  # seconds; the remote runners listen already
_PING = 1.0  # seconds without a call after which the remote runners are asked whether they must go


class RemoteRunnerLost(Exception):
    """A process of the engine is gone: the others cannot go on without it, and all start again."""


class RemoteRunners:
    """The other processes of an engine. `send`, `leaving` and `close` are for the thread of the engine."""

    def __init__(self, endpoints: Mapping[str, Endpoint], *, tls: Tls | None = None):
        """Connect to the remote runners, by their names (RemoteRunnerLost)."""
        self._tls = tls
        self._pools = {name: ConnectionPool(_CONNECT, tls) for name in endpoints}
        self._streams: dict[str, Connection] = {}
        self._clients = {name: RpcClient(endpoint, name=name, tls=tls) for name, endpoint in endpoints.items()}
        self._threads = ThreadPoolExecutor(max(1, len(endpoints)), "remote-runners")
        self._turn, self._sent, self._leaving, self._closed = 0, time.monotonic(), False, False
        for name, endpoint in endpoints.items():
            try:
                self._streams[name] = self._pools[name].take(endpoint)[0]
            except TransportError as error:
                raise _lost(name, error) from error

    @classmethod
    def meet(cls, processes: ProcessGroup, token: str, tls: Tls | None = None) -> Self:
        """Connect to the group's processes, which call `RemoteRunner.meet` (TimeoutError: names the late one)."""
        jax.devices()  # no process has devices until all open theirs, and a remote runner does before it listens
        role, authority = processes.name, None if tls is None else tls.authority
        found = processes.gather(None)[1:]
        endpoints = {
            process_name(role, index): Endpoint(host, port, token, authority)
            for index, (host, port) in enumerate(found, start=1)
        }
        return cls(endpoints, tls=tls)

    def send(self, call: RunnerCall) -> None:
        """Send a call to all remote runners (RemoteRunnerLost)."""
        for name, error in self._send(call).items():
            raise _lost(name, error) from error
        for name, stream in self._streams.items():
            self._read_answers(name, stream)
        self._sent = time.monotonic()

    def leaving(self) -> bool:
        """Return True if a remote runner was asked to end, by what it has answered so far."""
        if not self._leaving and not self._closed and time.monotonic() > self._sent + _PING:
            self.send(RunnerCall("ping"))
        return self._leaving

    def ask(self, operation: str, fields: Mapping[str, Any], timeout: float) -> Sequence[Future[dict[str, Any]]]:
        """Start a request to all remote runners; the futures hold the answers. Any thread may ask."""

        def ask_one(client: RpcClient) -> dict[str, Any]:
            try:
                return client.call(operation, dict(fields), timeout=timeout)[0]
            except Unreachable as error:
                raise RemoteRunnerLost(str(error)) from error

        return [self._threads.submit(ask_one, client) for client in self._clients.values()]

    def close(self) -> None:
        """Let the remote runners end their loops; they close the connections."""
        if not self._closed:
            self._closed = True
            self._send(RunnerCall("close"))  # one that is gone has ended, too
        for client in self._clients.values():
            client.close()

    def _send(self, call: RunnerCall) -> dict[str, TransportError]:
        """Send a call to all remote runners; returns the errors of those that are gone."""
        fields, arrays = to_message(call)
        header = encode_header({"operation": "run", "fields": {**fields, "turn": self._turn}})
        body = [view_of(array) for array in arrays]
        self._turn += 1
        gone: dict[str, TransportError] = {}
        for name, stream in self._streams.items():
            try:
                stream.send_message(REQUEST, header, body)
            except TransportError as error:
                gone[name] = error
        return gone

    def _read_answers(self, name: str, stream: Connection) -> None:
        """Read what a remote runner has answered to earlier calls (RemoteRunnerLost)."""
        try:
            while stream.readable(0.0):
                message = stream.read_message(_CONNECT)
                if message is None:
                    raise TransportError("the connection was closed")
                kind, answer, _ = message
                if kind == ERROR:
                    raise RemoteRunnerLost(f"{name} could not take a call: {answer.get('error')}")
                self._leaving = self._leaving or bool(answer["leaving"])
        except TransportError as error:
            raise _lost(name, error) from error


def _lost(name: str, error: TransportError) -> RemoteRunnerLost:
    return RemoteRunnerLost(f"{name} is gone: {error}")
