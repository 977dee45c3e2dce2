"""The weights of a simulated run: the real directory and broadcast, with flows in the place of bytes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.manifest import Commit, Shard, TensorSpec
from rl.parameter_server.push.publisher import Pusher
from rl.parameter_server.server import ParameterServer
from rl.protocol.messages import PullStats
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.flows import Flows, LinkDown
from rl.runtime.simulated.virtual_clock import VirtualClock

SERVER = "server"
CORES = "cores"


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """The network between the roles, and what moves over it."""

    clock: VirtualClock
    # Flows on the links; with one host there are none, and transfers take `Durations.push` and `.pull` alone
    flows: Flows
    durations: Durations  # seconds beside transfers
    nbytes: float  # bytes of a version

    def spend(self, seconds: float) -> None:
        """Let the seconds beside a transfer pass; on one host they are a core's."""
        if self.durations.cores is not None:
            self.flows.pass_through((CORES,), seconds, 1.0)
        elif seconds > 0:
            self.clock.sleep(seconds)

    def transfer(self, source: str, target: str) -> None:
        """Move a version; LinkDown: the source has died."""
        if self.durations.cores is None:
            core = () if self.durations.core_network is None else ("core",)
            self.flows.pass_through((f"{source}:out", *core, f"{target}:in"), self.nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedSnapshot:
    """A version on the trainer's host; its contents are its number."""

    version: int
    copied: int = 0

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of its one array."""
        return {"weights": f"{self.version:032x}"}

    @property
    def checksum(self) -> str:
        """Checksum of its contents."""
        return f"{self.version:032x}"

    def params(self, like: Any) -> Any:
        """Return arrays as they were given: there are none."""
        return like


class SimulatedPush:
    """A version on its way."""

    def __init__(self, clock: VirtualClock, snapshot: SimulatedSnapshot, run: Callable[[SimulatedSnapshot], None]):
        self._changed, self._snapshot, self._over = clock.condition(), snapshot, False

        def push() -> None:
            run(snapshot)
            with self._changed:
                self._over = True
                self._changed.notify_all()

        clock.thread(push, "push")

    def snapshot(self) -> SimulatedSnapshot:
        """Return the version."""
        return self._snapshot

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is published; False if it is not in time."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._over, timeout))


class SimulatedPublisher:
    """The publisher of the trainer: the protocol of the real one, of one process."""

    def __init__(self, links: Links, server: ParameterServer, pusher: Pusher | None = None, **kept: Any):
        del kept  # types and paths of arrays that there are not
        assert server.directory is not None
        self._links, self._server, self._directory = links, server, server.directory
        self._pusher = pusher or Pusher("trainer")

    def copy(self, params: Any, version: int, **kept: Any) -> SimulatedSnapshot:
        """Return the version."""
        return SimulatedSnapshot(version, int(self._links.nbytes))

    def publish_async(
        self, params: Any, version: int, then: Callable[[SimulatedSnapshot], None], **kept: Any
    ) -> SimulatedPush:
        """Publish a version, and call `then`."""

        def run(snapshot: SimulatedSnapshot) -> None:
            self._publish(snapshot)
            then(snapshot)

        return SimulatedPush(self._links.clock, self.copy(params, version, **kept), run)

    def republish(self, snapshot: SimulatedSnapshot) -> SimulatedPush:
        """Publish a version again."""
        return SimulatedPush(self._links.clock, snapshot, self._publish)

    def _publish(self, snapshot: SimulatedSnapshot) -> None:
        key = self._directory.open(snapshot.version, self._pusher.trainer, 1)
        self._links.spend(self._links.durations.push)
        self._links.transfer("trainer", SERVER)
        size, shard_server = int(self._links.nbytes), self._server.shard_server
        spec, shard = TensorSpec("weights", (size,), "uint8"), Shard("weights", ((0, size),), 0)
        alive = {0: shard_server.incarnation()}
        commit = Commit(snapshot.version, key, 0, 1, (spec,), (shard,), snapshot.fingerprints, alive)
        self._directory.commit(commit)


class SimulatedReceiver:
    """The receiver of a worker: from the server or from the peer that the real directory names."""

    def __init__(self, worker: str, links: Links, directory: Directory, *, peer_to_peer: bool):
        self.directory, self.stats = directory, PullStats()
        self._worker, self._links, self._peers = worker, links, peer_to_peer and links.durations.cores is None

    def pull(self, version: int, timeout: float = 0.0) -> int:
        """Wait for a version and its transfer; returns its number (WeightsError: no such one, or source, in time)."""
        clock = self._links.clock
        end = clock() + timeout
        manifest = self.directory.manifest(version, timeout)
        self.stats = PullStats(needed=int(self._links.nbytes), checksum=manifest.checksum)
        self._links.spend(self._links.durations.pull)
        if not self._peers:
            self._links.transfer(SERVER, self._worker)
            return version
        while True:
            left = max(0.0, end - clock())
            granted = self.directory.grant(self._worker, f"tcp://{self._worker}", "all", version, left)
            if granted is None:
                raise WeightsError(f"version {version}: no free source to read from for {left:.0f} s")
            number, source = granted
            try:
                self._links.transfer(SERVER if source is None else source.removeprefix("tcp://"), self._worker)
            except LinkDown:
                self.directory.failed(number, True)
                continue
            self.directory.done(number, True)
            self.stats.source = "server" if source is None else "worker"
            return version
