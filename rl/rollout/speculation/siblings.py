"""Drafts from completions of the same prompt: the other samples of the request, and answers of earlier requests.

In RL a prompt has several samples, and comes again in each epoch; their texts have long parts in common. Nothing is
trained and nothing is saved: answers are kept in the memory of a worker, and one that starts again finds new ones.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.draft import CONTEXT, NOTHING, Draft, continuation


class SiblingDrafter(Configurable):
    """Continues as a completion of the same prompt did after the same last tokens."""

    class Config(ConfigBase["SiblingDrafter"]):
        match: int = 16  # limit of a sequence's last tokens that are compared
        answers: int = 32  # number of answers kept for a prompt, the latest ones
        memory: int = 1 << 20  # tokens of kept answers in all; those of prompts that came longest ago go first

        @override
        def check_fields(self) -> None:
            self.require_least(1, "match", "answers")
            self.require_least(0, "memory")

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._answers: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()  # prompt -> answers, the latest last
        self._running: dict[tuple[int, int], np.ndarray] = {}  # (request, sample) -> tokens
        self.held = 0  # tokens of kept answers

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        """Return what followed the sequence's last tokens in another completion of its prompt."""
        texts = [*self._kept(sequence), *self._siblings(sequence)]
        if not texts:
            return None
        # Each begins with the prompt's end, so that the first token too has something to match.
        start = np.concatenate([[NOTHING], sequence.prompt[-self._cfg.match :]]).astype(np.int32)
        text = np.concatenate([part for text in texts for part in (start, text)])
        return continuation(text, np.asarray(sequence.tokens[-self._cfg.match :], np.int32), count)

    def remember(self, group: SequenceGroup) -> None:
        """Keep the completions of a request that has ended."""
        new = [_completion(one) for one in group.sequences if not one.is_prefix and one.drawn > CONTEXT]
        for one in group.sequences:
            self._running.pop((group.number, one.sample), None)
        if not new or not self._cfg.memory:
            return
        prompt = _key(group)
        before = self._answers.pop(prompt, [])
        self._answers[prompt] = kept = (before + new)[-self._cfg.answers :]
        self.held += sum(map(len, kept)) - sum(map(len, before))
        while self.held > self._cfg.memory:
            _, dropped = self._answers.popitem(last=False)
            self.held -= sum(map(len, dropped))

    def _kept(self, sequence: Sequence) -> list[np.ndarray]:
        prompt = _key(sequence.group)
        if prompt in self._answers:
            self._answers.move_to_end(prompt)
        return self._answers.get(prompt, [])

    def _siblings(self, sequence: Sequence) -> Iterator[np.ndarray]:
        """Yield the completions of the other samples so far."""
        for other in sequence.group.sequences:
            if other is sequence or other.is_prefix or not other.drawn:
                continue
            name = sequence.group.number, other.sample
            if len(self._running.get(name, ())) != other.drawn:
                self._running[name] = _completion(other)
            yield self._running[name]


def _completion(sequence: Sequence) -> np.ndarray:
    return sequence.output_tokens


def _key(group: SequenceGroup) -> bytes:
    return group.request.prompt.tokens.tobytes()
