"""Drafts from a sequence's own text: what followed the same tokens earlier in its prompt or completion."""

from typing import override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.draft import Draft, continuation


class OwnTextDrafter(Configurable):
    """Continues as the sequence itself did after its longest repeated end (prompt lookup; n-grams)."""

    class Config(ConfigBase["OwnTextDrafter"]):
        match: int = 16  # limit of last tokens that are compared

        @override
        def check_fields(self) -> None:
            self.require_least(1, "match")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def draft(self, sequence: Sequence, count: int) -> Draft:
        """Return what followed the sequence's last tokens where it had them before."""
        text = np.asarray(sequence.tokens, np.int32)
        return continuation(text, text[-self._cfg.match :], count)

    def remember(self, group: SequenceGroup) -> None:
        """Keep nothing."""
