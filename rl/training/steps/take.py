"""First step: agreement of the trainer's processes on a batch. All must update by the same rollouts or none may.

All have the headers of the batch. Of its tokens, which are most of the bytes, each fetches those of its own rows.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mesh.distributed import ProcessGroup
from rl.protocol.headers import GroupHeader, digest_of_headers, header_of, matches
from rl.protocol.messages import RolloutData, contents_of
from rl.protocol.protocols import BatchSource

_BATCH_AGAIN = 2.0  # seconds for a batch that the leader has got already

RolloutIndex = tuple[int, int]  # group of a batch, and rollout of the group


class AgreedBatch(NamedTuple):
    """A batch that all processes have: its headers, and all its contents where there is one process."""

    step: int
    headers: list[GroupHeader]
    contents: RolloutData | None


class TakeStep:
    """Batches of the controller, the same in all processes, which make all calls together."""

    def __init__(self, source: BatchSource, group: ProcessGroup):
        self._source, self._group = source, group
        self._plan: Mapping[str, Any] | None = None  # state after the last batch; empty: there is none in this run

    def __call__(self, step: int, timeout: float) -> AgreedBatch | None:
        """Return the batch of a step.

        None if it is not complete within `timeout` seconds, or one process cannot get it (the controller may have died
        after it gave it to others).
        """
        source, group = self._source, self._group
        if group.count == 1:
            groups = source.next_batch(step, timeout)
            return None if groups is None else AgreedBatch(step, [header_of(g) for g in groups], contents_of(groups))
        headers = source.headers(step, timeout) if group.leader else None
        digest = group.broadcast(None if headers is None else digest_of_headers(headers))
        if digest is None:
            return None
        if not group.leader:
            headers = source.headers(step, _BATCH_AGAIN)
        lacking = headers is None or digest_of_headers(headers) != digest
        return None if group.any(lacking) or headers is None else AgreedBatch(step, headers, None)

    def contents(self, batch: AgreedBatch, wanted: Iterable[RolloutIndex]) -> RolloutData | None:
        """Return the rollouts that this process needs; None if one process cannot get its own."""
        if batch.contents is not None:
            return batch.contents
        rollouts: dict[int, set[int]] = {}
        for g, n in wanted:
            rollouts.setdefault(g, set()).add(n)
        contents = self._source.contents(batch.step, {g: tuple(sorted(own)) for g, own in rollouts.items()})
        lacking = contents is None or not matches(contents, batch.headers)
        return None if self._group.any(lacking) else contents

    def plan_after(self, step: int) -> Mapping[str, Any] | None:
        """Return the plan's state once the step is consumed; None: a controller that has restarted lacks it."""
        if self._plan != {}:
            self._plan = self._group.broadcast(self._source.plan_after(step) if self._group.leader else None)
        return self._plan

    def consumed(self, step: int) -> Mapping[str, float]:
        """Mark the batch as consumed; return the controller's figures."""
        return self._source.consumed(step) if self._group.leader else {}
