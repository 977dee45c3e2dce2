"""A version on its way from all processes of a trainer, who must agree on whether it has arrived."""

from mesh.distributed import ProcessGroup
from rl.parameter_server.push.publisher import Publisher, Push
from rl.parameter_server.push.snapshot import Snapshot

_SKEW = 0.5  # seconds by which one process may know later than another that a version is published


class CoordinatedPush:
    """Every process of the trainer has one for each of its pushes, and all ask the same of it in the same order.

    A parameter server that dies may have told some of them that the version is published, and others never. The others
    try again, which needs the commits of all: so those push it once more, too.
    """

    def __init__(self, push: Push, publisher: Publisher, processes: ProcessGroup):
        self._push, self._publisher, self._all = push, publisher, processes

    def snapshot(self) -> Snapshot:
        """What was copied, as soon as it is."""
        return self._push.snapshot()

    def settled(self) -> bool:
        """Whether all know it to be published; raises what went wrong with this process's part."""
        pending = not self._push.wait(_SKEW if self._all.count > 1 else 0.0)
        if not self._all.any(pending):
            return True
        if not pending:
            self._push = self._publisher.republish(self._push.snapshot())
        return False

    def settle(self) -> None:
        """Wait until all know it to be published; raises what went wrong with this process's part."""
        if self._all.count == 1:
            self._push.wait()
        while not self.settled():
            pass
