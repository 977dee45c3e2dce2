"""Scored groups -> the arrays of one update, in rows for `GroupContext` or `PackedGroupContext`.

What depends on the whole batch (advantages, weights, which rollout is in which row) follows from the headers of its
groups (`arrangement`). The tokens are needed only of the rollouts in the rows that are filled (`fill`).
"""

from rl.training.batching.arrangement import Arranged, Minibatch, arrange
from rl.training.batching.arrays import Batch
from rl.training.batching.fill import fill_packed, fill_padded
from rl.training.batching.layout import Layout, PackedRows, PaddedRows

__all__ = [
    "Arranged",
    "Batch",
    "Layout",
    "Minibatch",
    "PackedRows",
    "PaddedRows",
    "arrange",
    "fill_packed",
    "fill_padded",
]
