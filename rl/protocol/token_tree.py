"""The tree of a group's rollouts: what they begin with in common, token for token.

Samples of a prompt begin alike by chance, all of them where the policy is sure; forks of an episode share the turns
before the fork, and a rollout may be another's beginning. A token of the tree stands for all rollouts through it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class TokenTree(NamedTuple):
    """The rollouts of a group in pre-order: those with a common beginning are neighbours, a beginning comes first."""

    order: tuple[int, ...]  # indices of the rollouts
    common: tuple[int, ...]  # tokens that each, in this order, has in common with the one before it; 0 of the first

    def shared(self) -> np.ndarray:
        """Return int [rollouts, rollouts], tokens that two of them have in common; 0 of one with itself."""
        found, order = np.zeros((len(self.order), len(self.order)), int), np.asarray(self.order, int)
        for i, rollout in enumerate(self.order):
            behind = np.minimum.accumulate(np.asarray(self.common[i + 1 :], int))
            found[rollout, order[i + 1 :]] = found[order[i + 1 :], rollout] = behind
        return found

    def families(self, rollouts: Mapping[int, int]) -> list[list[int]]:
        """Return rollouts (index -> tokens) with a common first token, in pre-order, the longest's family first."""
        found: list[list[int]] = []
        for rollout, common in zip(self.order, self.common, strict=True):
            if not common or not found:
                found.append([])
            if rollout in rollouts:
                found[-1].append(rollout)
        found = [family for family in found if family]
        return sorted(found, key=lambda family: (-max(rollouts[n] for n in family), min(family)))

    def distinct(self, rollouts: Mapping[int, int]) -> int:
        """Return the tokens of the tree of these rollouts (index -> tokens)."""
        total, common = 0, 0
        for rollout, with_last in zip(self.order, self.common, strict=True):
            common = min(common, with_last)
            if rollout in rollouts:
                total, common = total + rollouts[rollout] - common, rollouts[rollout]
        return total


def token_tree(rollouts: Sequence[np.ndarray]) -> TokenTree:
    """Return the tree of rollouts, given the tokens of each."""
    keys = [np.asarray(tokens).astype(">u4").tobytes() for tokens in rollouts]  # bytes in the order of the ids
    order = sorted(range(len(keys)), key=lambda n: (keys[n], n))
    pairs = zip(order[:-1], order[1:], strict=True)
    return TokenTree(tuple(order), (*(0 for _ in order[:1]), *(_common(rollouts[a], rollouts[b]) for a, b in pairs)))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    if not (size := min(len(one), len(other))):
        return 0
    same = np.asarray(one)[:size] == np.asarray(other)[:size]
    first = int(same.argmin())  # first that differs, if one does
    return size if same[first] else first
