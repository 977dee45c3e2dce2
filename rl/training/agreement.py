"""Agreement of the trainer's processes on a batch: all must update by the same rollouts or none may."""

from mesh.distributed import ProcessGroup
from rl.roles.messages import Group
from rl.roles.protocols import BatchSource
from rl.training.batching import digest_of_groups

_BATCH_AGAIN = 2.0  # seconds for a batch that the leader has got already


def agreed_batch(source: BatchSource, group: ProcessGroup, step: int, timeout: float) -> list[Group] | None:
    """Return the batch of a step, the same in all processes.

    None if it is not complete within `timeout` seconds, or one process cannot get it (the controller may have died
    after it gave it to others).
    """
    if group.count == 1:
        return source.next_batch(step, timeout)
    groups = source.next_batch(step, timeout) if group.leader else None
    digest = group.broadcast(None if groups is None else digest_of_groups(groups))
    if digest is None:
        return None
    if not group.leader:
        groups = source.next_batch(step, _BATCH_AGAIN)
    lacking = groups is None or digest_of_groups(groups) != digest
    return None if group.any(lacking) else groups
