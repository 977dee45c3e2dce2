"""Coupled drafts: the rollout that the same keys have drawn before, under a neighbouring policy.

A draw is a function of (seed, prompt, sample, position) and of the policy. Drawn again with the same noise, a token
changes only where the change of the policy changes the largest of logit and noise, so most of an earlier rollout is
right. It is verified as all drafts are: a token is kept if and only if it is what the key of its place draws.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.acceptance import Acceptance
from rl.rollout.speculation.draft import CONTEXT, NOTHING, longest_suffix

_CHUNKS = (8, 16, 32)
MOST = _CHUNKS[-1]
_TOKENS = 512  # tokens of a dispatch, in all rows
_MATCH = 4  # last tokens by which a sequence that has diverged finds its place in the earlier text again
_MEMORY = 0.9  # weight of what was measured before a dispatch, after it
_RETRY = 16  # a dispatch that did not pay is tried again after so many chances

Shape = tuple[int, int]  # rows, tokens of each


@dataclasses.dataclass(frozen=True, slots=True)
class Redraw:
    """Sequences of a dispatch, drafts of each (one token or more), and its shape."""

    sequences: Items[Sequence]
    drafts: Items[np.ndarray]
    shape: Shape


@dataclasses.dataclass(slots=True)
class _Cost:
    """The measured seconds of dispatches, and the tokens that came of them, or steps; `skipped`: chances not taken."""

    seconds: float = 0.0
    count: float = 0.0
    skipped: int = 0

    def add(self, seconds: float, count: int) -> None:
        self.seconds, self.count = _MEMORY * self.seconds + seconds, _MEMORY * self.count + count

    @property
    def each(self) -> float:
        return self.seconds / self.count if self.count else math.inf


class EarlierRollouts:
    """Drafts from `Request.earlier`, and what became of them.

    Attributes:
        adaptive: make no dispatch that was measured to take longer than decoding the same tokens; and as deep drafts as
            were found to be right. False: verify all that there is.
        counts: since the start.
    """

    def __init__(self, vocab: int, most_rows: int):
        """`vocab`: tokens of the model; a draft ends before any other. `most_rows`: sequences that draw at a time."""
        self._vocab, self._most_rows = vocab, most_rows
        self.adaptive = True
        self.counts = dict.fromkeys(("coupled_drafted_tokens", "coupled_accepted_tokens", "coupled_dispatches"), 0)
        self._shifts: dict[tuple[int, int], tuple[int | None, int]] = {}  # sequence -> (next place - drawn, drawn)
        self._refused: set[tuple[int, int]] = set()
        self._acceptance = {True: Acceptance(), False: Acceptance()}  # True: at the same position
        self._steps: dict[int, _Cost] = {}  # rows of decoding -> cost of a step
        self._redraws: dict[Shape, _Cost] = {}  # shape -> cost of a token

    def choose(self, sequences: Mapping[Sequence, int], plain_rows: int, plain: int) -> list[Redraw]:
        """Return dispatches that verify earlier rollouts of these sequences; none: decoding is as good.

        Args:
            plain_rows: rows of the dispatch that would decode them, and others.
            plain: sequences that it would decode.
        """
        found = [(one, draft) for one, room in sequences.items() if len(draft := self.draft(one, room))]
        found.sort(key=lambda pair: -len(pair[1]))
        chosen: list[Redraw] = []
        while found:
            chunk = next((size for size in _CHUNKS if size > len(found[0][1])), _CHUNKS[-1])
            rows = min(_TOKENS // chunk, self._most_rows)
            rows = min(size for size in (rows, -(-rows // 2), -(-rows // 4)) if size >= min(len(found), rows))
            part, found = found[:rows], found[rows:]
            if self._pays((rows, chunk), plain_rows, plain):
                drafts = [draft[: chunk - 1] for _, draft in part]
                chosen.append(Redraw([one for one, _ in part], drafts, (rows, chunk)))
        return chosen

    def draft(self, sequence: Sequence, room: int) -> np.ndarray:
        """Return what the sequence is expected to go on with, int32, as deep as makes sense; empty: it is unknown.

        `room`: tokens that it has pages for.
        """
        earlier, key = sequence.group.request.earlier, _key(sequence)
        none = np.zeros(0, np.int32)
        if sequence.sample >= len(earlier) or sequence.is_prefix or key in self._refused:
            return none
        text, drawn = earlier[sequence.sample], sequence.drawn
        shift, known = self._shifts.get(key, (0, 0))
        if drawn > known or key not in self._shifts:
            shift = self._follow(sequence, text, shift, known)
            self._shifts[key] = shift, drawn
        if shift is None:
            return none
        most = min(sequence.remaining, room, MOST) - 1
        if self.adaptive:
            most = min(most, self._acceptance[shift == 0].depth)
        draft = text[drawn + shift :][: max(0, most)]
        wrong = np.flatnonzero((draft < 0) | (draft >= self._vocab))
        return draft[: wrong[0]] if len(wrong) else draft

    def _follow(self, sequence: Sequence, text: np.ndarray, shift: int | None, known: int) -> int | None:
        """Return the shift after more tokens, or None.

        It is as before while they are the text's, else by the last of them; where those are nowhere in the text, as
        before again if only the last token differs from it: one was replaced, and what follows has the same noise.
        """
        new = sequence.tokens[len(sequence.prompt) + known :]
        old = text[: 0 if shift is None else None][known + (shift or 0) :][: len(new)]
        if np.array_equal(new, old):
            return shift
        places, matched = longest_suffix(np.append(text, NOTHING), np.asarray(sequence.output_tokens[-CONTEXT:]))
        if matched < _MATCH:
            return shift if len(old) == len(new) > 1 and np.array_equal(new[:-1], old[:-1]) else None
        shifts = places - sequence.drawn
        return int(shifts[np.argmin(np.abs(shifts))])

    def _pays(self, shape: Shape, plain_rows: int, count: int) -> bool:
        """Return True unless a dispatch of this shape was measured to cost more for a token than decoding does."""
        step = self._steps.get(plain_rows)
        cost = self._redraws.setdefault(shape, _Cost())
        if not self.adaptive or (step is not None and cost.each < step.each / count):
            return True
        if step is None or (cost.count and cost.skipped < _RETRY):
            cost.skipped += 1
            return False
        cost.skipped = 0
        return True

    # ---- what became of drafts

    def decoded(self, rows: int, steps: int, seconds: float) -> None:
        """Note what a dispatch of decoding took, which compiled nothing."""
        if steps:
            self._steps.setdefault(rows, _Cost()).add(seconds, steps)

    def measured(self, redraw: Redraw, accepted: np.ndarray, drawn: int, seconds: float | None) -> None:
        """Note what a dispatch has brought: tokens accepted of each draft, and all that were drawn.

        `seconds`: None where it compiled a program.
        """
        drafted = sum(map(len, redraw.drafts))
        for name, count in zip(self.counts, (drafted, int(accepted.sum()), 1), strict=True):
            self.counts[name] += count
        for aligned, record in self._acceptance.items():
            mine = [n for n, one in enumerate(redraw.sequences) if (self._shifts[_key(one)][0] == 0) is aligned]
            if mine:
                record.decay(_MEMORY)
                record.accepted += int(accepted[mine].sum())
                record.missed += sum(int(accepted[n]) < len(redraw.drafts[n]) for n in mine)
        if seconds is not None:
            self._redraws.setdefault(redraw.shape, _Cost()).add(seconds, drawn)

    def refuse(self, sequence: Sequence) -> None:
        """Draft no more for a sequence."""
        self._refused.add(_key(sequence))

    def forget(self, group: SequenceGroup) -> None:
        """Note a request that has ended."""
        for sequence in group.sequences:
            self._shifts.pop(_key(sequence), None)
            self._refused.discard(_key(sequence))


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.group.number, sequence.sample
