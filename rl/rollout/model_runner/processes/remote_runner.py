"""A process of an engine that spans several: it makes the calls that the leader sends, and pulls its own slices."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Self

from axlearn_like.layers.base import Params
from mesh.distributed import ProcessGroup
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.manifest import Manifest
from rl.parameter_server.pull.receiver import Receiver
from rl.parameter_server.transport.server import Body, RpcServer
from rl.parameter_server.transport.tls import Tls
from rl.rollout.model_runner.processes.calls import RunnerCall, from_message
from rl.rollout.model_runner.runner import ModelRunner

_POLL = 1.0  # seconds between two looks at whether this process must go, while there are no calls


class RemoteRunner:
    """One process of an engine, without a scheduler."""

    def __init__(
        self, runner: ModelRunner, receiver: Receiver, token: str, *, host: str = "127.0.0.1", tls: Tls | None = None
    ):
        """Listen for the leader, which knows the token."""
        self._runner, self._receiver = runner, receiver
        self._calls: queue.SimpleQueue[RunnerCall] = queue.SimpleQueue()
        self._turn = 0
        self._leaving: Callable[[], bool] = lambda: False
        self._pulling, self._lock = threading.Lock(), threading.Lock()
        # By the key of a version: arrays in the trainer's layout, then in the engine's.
        self._pulled: dict[int, tuple[Manifest, Params]] = {}
        self._placed: dict[int, Params] = {}
        self._server = RpcServer(self._answer, host=host, token=token, tls=tls)

    def meet(self, processes: ProcessGroup) -> Self:
        """Let the leader of the group connect; it calls `RemoteRunners.meet`."""
        endpoint = self._server.endpoint
        processes.gather([endpoint.host, endpoint.port])
        return self

    def run(self, leaving: Callable[[], bool] = lambda: False) -> None:
        """Make the leader's calls to their end, or `leaving()`; if it dies, jax.distributed ends this process."""
        self._leaving = leaving
        while (call := self._calls.get()).name != "close":
            if call.name == "place":
                self._place(int(call.options["key"] or 0))
            elif call.name == "install":
                self._install(int(call.options["key"] or 0))
            elif call.name != "ping":
                getattr(self._runner, call.name)(*call.arguments, **call.options)
        self._server.close()

    def _pull(self, version: int, key: int, drop: list[int], timeout: float) -> dict[str, Any]:
        """Pull this process's slices of a version that all processes of the engine pull under the same key."""
        manifest = self._receiver.directory.manifest(version, timeout)
        if manifest.key != key:
            raise VersionGone(f"version {version} was published again")
        with self._pulling:  # the leader may have given up waiting for the one before
            params, stats = self._receiver.fetch(manifest, timeout), self._receiver.stats
        with self._lock:
            self._pulled = {old: held for old, held in self._pulled.items() if old not in drop}
            self._pulled[key] = manifest, params
        return {name: getattr(stats, name) for name in ("needed", "read", "network", "mapped")}

    def _place(self, key: int) -> None:
        with self._lock:
            manifest, params = self._pulled.pop(key)
        try:
            self._receiver.check(manifest, params)
        except WeightsError:
            return  # same in all processes; the leader reports it, and pulls again
        self._placed[key] = self._runner.place(params)

    def _install(self, key: int) -> None:
        self._runner.install(self._placed[key])
        self._placed.clear()  # earlier placed weights are never installed

    def _answer(self, operation: str, fields: dict[str, Any], body: Body) -> dict[str, Any]:
        if operation == "run":
            call = from_message(fields, body.read())
            if fields["turn"] != self._turn:
                raise ValueError(f"call {fields['turn']} came where call {self._turn} was due")
            self._turn += 1
            self._calls.put(call)
            return {"leaving": self._leaving()}
        if operation == "pull":
            return self._pull(**fields)
        raise ValueError(f"no such operation: {operation}")
