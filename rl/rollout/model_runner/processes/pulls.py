"""Versions for an engine that spans processes: each pulls its own slices, then all verify, place and swap together.

Transfers run beside the dispatches. What runs on the devices (fingerprints, the engine's layout) is one of the ordered
calls, because all processes must start their programs in the same order.
"""

import dataclasses
import time

from axlearn_like.layers.base import Params
from rl.parameter_server.errors import VersionGone
from rl.parameter_server.manifest import Manifest
from rl.parameter_server.pull.receiver import Receiver
from rl.protocol.messages import PullStats
from rl.rollout.model_runner.executor import Executor
from rl.rollout.model_runner.processes.remote_runners import RemoteRunners
from rl.rollout.model_runner.weights import PlacedWeights

_PAUSE = 0.2  # seconds between attempts
_TRANSFER = 600.0  # seconds that a remote runner may take for a transfer


@dataclasses.dataclass(frozen=True, slots=True)
class Pulled:
    """Slices of a version that the leader has pulled, while all remote runners have pulled theirs."""

    manifest: Manifest
    params: Params


class GroupReceiver:
    """The receiver of the leader: a version has come when every process of the engine has its slices."""

    def __init__(self, receiver: Receiver, remote_runners: RemoteRunners):
        self._receiver, self._remote_runners = receiver, remote_runners
        self.directory, self.stats = receiver.directory, PullStats()
        self._waiting: list[int] = []  # keys that were pulled and not placed

    @property
    def approximations(self) -> tuple[str, ...]:
        """Return tags for rollouts that are drawn with these weights."""
        return self._receiver.approximations

    def pull(self, version: int, timeout: float = 0.0) -> Pulled:
        """Return a version, within `timeout` seconds (WeightsError: late to some process, damaged, or another's)."""
        end = time.monotonic() + timeout
        while True:
            manifest = self.directory.manifest(version, max(0.0, end - time.monotonic()))
            try:
                return self._pull(manifest, end)
            except VersionGone:  # a server was restarted: the trainer is about to publish again
                if time.monotonic() >= end:
                    raise
                time.sleep(_PAUSE)

    def place(self, pulled: Pulled, executor: Executor) -> PlacedWeights:
        """Verify and place a version in all processes, in the engine's thread (WeightsError: not the trainer's)."""
        key = pulled.manifest.key
        self._waiting.remove(key)
        executor.order_place(key)
        self._receiver.check(pulled.manifest, pulled.params)
        runner = executor.runner
        return PlacedWeights(runner.place(pulled.params), (*self.approximations, *runner.approximations), key)

    def _pull(self, manifest: Manifest, end: float) -> Pulled:
        began, left = time.monotonic(), max(0.0, end - time.monotonic())
        fields = {"version": manifest.version, "key": manifest.key, "drop": self._waiting, "timeout": left}
        answers = self._remote_runners.ask("pull", fields, left + _TRANSFER)
        self._waiting = [manifest.key]
        try:
            params = self._receiver.fetch(manifest, left)
        finally:
            found = [answer.exception() or answer.result() for answer in answers]  # all have ended
        stats = dataclasses.replace(self._receiver.stats)
        for one in found:
            if isinstance(one, BaseException):
                raise one
            for name, count in one.items():
                setattr(stats, name, getattr(stats, name) + count)
        stats.seconds = time.monotonic() - began
        self.stats = stats
        return Pulled(manifest, params)
