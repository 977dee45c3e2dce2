"""Samples that have spawned others, as the objective sees them: the sample's tokens, then those of its nodes.

So groups compare samples, and a mean over a sample's tokens is one over its whole tree. In rows each completion is a
rollout by itself, which shares what it begins with.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl.objective.advantage import Turns
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import Score


class Trees(NamedTuple):
    """The place of each of N rollouts among M samples."""

    samples: np.ndarray  # int[M], the rollout that each sample is itself
    sample: np.ndarray  # int[N], the sample that each rollout belongs to
    first: np.ndarray  # int[N], place of its first token among those of the sample
    lengths: np.ndarray  # int[N]

    @property
    def width(self) -> int:
        """Tokens of the largest sample."""
        return int((self.first + self.lengths).max(initial=0))

    def join[Array: np.ndarray | None](self, array: Array) -> Array:
        """[N, T] -> [M, width]; None stays None."""
        if array is None:
            return array
        joined = np.zeros((len(self.samples), self.width), array.dtype)
        for n, (sample, first, length) in enumerate(zip(self.sample, self.first, self.lengths, strict=True)):
            joined[sample, first : first + length] = array[n, :length]
        return joined

    def split(self, array: np.ndarray, length: int) -> np.ndarray:
        """[M, width] -> [N, length], or [M] -> [N]."""
        if array.ndim == 1:
            return array[self.sample]
        found = np.zeros((len(self.sample), length), array.dtype)
        for n, (sample, first, size) in enumerate(zip(self.sample, self.first, self.lengths, strict=True)):
            found[n, :size] = array[sample, first : first + size]
        return found

    def turns(self, scores: Sequence[Score]) -> Turns:
        """Return the end and the reward of each sample's own tokens and of each of its nodes'."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.samples]
        for n, score in enumerate(scores):
            found[self.sample[n]].append((int(self.first[n] + self.lengths[n]), score.reward))
        return found


def trees_of(headers: Sequence[GroupHeader]) -> Trees | None:
    """Return the trees of all rollouts in order; None: no sample has a node that is trained on."""
    rollouts = [(g, rollout) for g, header in enumerate(headers) for rollout in header.rollouts]
    if all(rollout.node is None for _, rollout in rollouts):
        return None
    samples = [n for n, (_, rollout) in enumerate(rollouts) if rollout.node is None]
    places = {(rollouts[n][0], rollouts[n][1].sample_id): m for m, n in enumerate(samples)}
    sample = [places[g, one.sample_id if one.node is None else one.node.sample] for g, one in rollouts]
    ends, first = np.zeros(len(samples), int), list[int]()
    for m, (_, one) in zip(sample, rollouts, strict=True):
        first.append(int(ends[m]))
        ends[m] += one.length
    lengths = np.asarray([one.length for _, one in rollouts])
    return Trees(np.asarray(samples), np.asarray(sample), np.asarray(first), lengths)
