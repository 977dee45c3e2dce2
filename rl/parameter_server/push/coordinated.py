"""Publication of one version by all processes of a trainer, which must agree on the outcome."""

from mesh.distributed import ProcessGroup
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.push.push import Push
from rl.parameter_server.push.snapshot import Snapshot

_SKEW = 0.5  # seconds between the confirmations of two processes


class CoordinatedPush:
    """Push of one process of a trainer; all processes call its methods in the same order.

    A parameter server that dies may have confirmed the version to some processes and not to others. The others try
    again, which needs the commits of all, so the confirmed ones push once more, too.
    """

    def __init__(self, push: Push, publisher: Publisher, processes: ProcessGroup):
        self._push, self._publisher, self._all = push, publisher, processes

    def snapshot(self) -> Snapshot:
        """Wait until the host copy is complete and return it."""
        return self._push.snapshot()

    def settled(self) -> bool:
        """Return True if all processes know the version as published. Raises the error of this process."""
        pending = not self._push.wait(_SKEW if self._all.count > 1 else 0.0)
        if not self._all.any(pending):
            return True
        if not pending:
            self._push = self._publisher.republish(self._push.snapshot())
        return False

    def settle(self) -> None:
        """Wait until all processes know the version as published. Raises the error of this process."""
        if self._all.count == 1:
            self._push.wait()
        while not self.settled():
            pass
