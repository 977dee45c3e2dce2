"""Rollouts that are kept as drafts: of prompts whose keys are drawn again under another version."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from rl.protocol.messages import Group, Prompt

EarlierTokens = tuple[tuple[np.ndarray, ...], ...]  # prompt -> sample -> int32


class RolloutMemory:
    """The latest tokens of each prompt's samples, up to a number in all; those kept longest go first.

    A cache: what is lost costs time and changes nothing.
    """

    def __init__(self, most: int):
        """`most`: tokens; 0: nothing is kept."""
        self._most = most
        self._kept: OrderedDict[int, tuple[np.ndarray, ...]] = OrderedDict()  # prompt id -> tokens of its samples
        self.held = 0

    def remember(self, groups: Sequence[Group]) -> None:
        """Keep what the policy has drawn of these groups, in the place of what was kept of their prompts."""
        for group in groups:
            self._drop(group.prompt.id)
            if self._most:
                tokens = tuple(one.tokens for one in group.rollouts if one.is_sample)
                self._kept[group.prompt.id] = tokens
                self.held += sum(map(len, tokens))
        while self.held > self._most:
            self._drop(next(iter(self._kept)))

    def of(self, prompts: Sequence[Prompt]) -> EarlierTokens:
        """Return what is kept of these prompts; empty: nothing is."""
        found = tuple(self._kept.get(prompt.id, ()) for prompt in prompts)
        return found if any(found) else ()

    def _drop(self, prompt: int) -> None:
        self.held -= sum(map(len, self._kept.pop(prompt, ())))
