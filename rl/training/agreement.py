"""Agreement of the trainer's processes on a batch: all must update by the same rollouts or none may.

All have the headers of the batch. Of its tokens, which are most of the bytes, each fetches those of its own rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mesh.distributed import ProcessGroup
from rl.protocol.headers import GroupHeader, digest_of_headers, header_of, matches
from rl.protocol.messages import RolloutData, contents_of
from rl.protocol.protocols import BatchSource

_BATCH_AGAIN = 2.0  # seconds for a batch that the leader has got already


class AgreedBatch(NamedTuple):
    """A batch that all processes have: its headers, and all its contents where there is one process."""

    step: int
    headers: list[GroupHeader]
    contents: RolloutData | None


def agreed_batch(source: BatchSource, group: ProcessGroup, step: int, timeout: float) -> AgreedBatch | None:
    """Return the batch of a step, the same in all processes.

    None if it is not complete within `timeout` seconds, or one process cannot get it (the controller may have died
    after it gave it to others).
    """
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


def fetched(
    batch: AgreedBatch, source: BatchSource, group: ProcessGroup, wanted: Mapping[int, set[int]]
) -> RolloutData | None:
    """Return the contents that this process needs; None if one process cannot get its own.

    Args:
        batch: agreed.
        source: source of the batch.
        group: all processes, which call this together.
        wanted: group -> rollouts, by their indices.
    """
    if batch.contents is not None:
        return batch.contents
    contents = source.contents(batch.step, {g: tuple(sorted(rollouts)) for g, rollouts in wanted.items()})
    lacking = contents is None or not matches(contents, batch.headers)
    return None if group.any(lacking) else contents
