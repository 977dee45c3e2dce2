"""A drafter that knows what plain decoding draws, and proposes it rightly, wrongly, or in part."""

from collections.abc import Mapping

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.rollout.engine import RolloutEngine
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.draft import NOTHING, Draft


class Oracle(Configurable):
    """Proposes `answers`, by (prompt id, sample), of which a share of the tokens is replaced by random ones."""

    class Config(ConfigBase["Oracle"]):
        pass

    def __init__(self, cfg: Config):
        del cfg
        self.answers: Mapping[tuple[int, int], np.ndarray] = {}
        self.wrong, self.highest = 0.0, 272  # share, and one more than the largest token
        self.random = np.random.default_rng(0)
        self.ended = 0

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        answer = self.answers.get((sequence.group.request.prompt.id, sequence.sample))
        if answer is None:
            return None
        tokens = np.concatenate([sequence.prompt, answer])[len(sequence.tokens) :][:count].astype(np.int32)
        replaced = self.random.random(len(tokens)) < self.wrong
        tokens[replaced] = self.random.integers(NOTHING, self.highest, int(replaced.sum()))
        return Draft(tokens, 1, tokens)

    def remember(self, group: SequenceGroup) -> None:
        del group
        self.ended += 1


def oracle(engine: RolloutEngine) -> Oracle:
    """Return the drafter of an engine that was built with it."""
    speculation = engine.speculation
    assert speculation is not None
    (found,) = speculation._drafters
    assert isinstance(found, Oracle)
    return found
