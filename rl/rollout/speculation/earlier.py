"""Coupled drafts: the rollout that the same keys have drawn before, under a neighbouring policy.

A draw is a function of (seed, prompt, sample, position) and of the policy. Drawn again with the same noise, a token
changes only where the change of the policy changes the largest of logit and noise, so most of an earlier rollout is
right. It is verified as all drafts are: a token is kept if and only if it is what the key of its place draws.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.acceptance import Acceptance
from rl.rollout.speculation.draft import CONTEXT, NOTHING, longest_suffix

_CHUNKS = (8, 16, 32)  # tokens that a dispatch feeds each row
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
    """The measured seconds of dispatches, and their number, or that of their tokens; `skipped`: chances not taken."""

    seconds: float = 0.0
    count: float = 0.0
    skipped: int = 0

    def add(self, seconds: float, count: int) -> None:
        self.seconds, self.count = _MEMORY * self.seconds + seconds, _MEMORY * self.count + count

    @property
    def each(self) -> float:
        return self.seconds / self.count if self.count else math.inf


class _Place(NamedTuple):
    """A place in an earlier text."""

    shift: int | None  # place of the next token, less the tokens drawn; None: it is unknown
    drawn: int  # tokens drawn when this was found
    same: bool  # all of them are the text's


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
        self._places: dict[tuple[int, int], _Place] = {}
        self._refused: set[tuple[int, int]] = set()
        self._acceptance = {True: Acceptance(), False: Acceptance()}  # True: of sequences that have drawn nothing else
        self._decoding: dict[int, _Cost] = {}  # rows of a dispatch of decoding -> cost of a token
        self._redraws: dict[Shape, _Cost] = {}  # shape -> cost of a dispatch

    def choose(self, sequences: Mapping[Sequence, int], plain_rows: int) -> list[Redraw]:
        """Return dispatches that verify earlier rollouts of these sequences; none: decoding is as good.

        `plain_rows`: rows of the dispatch that would decode them, and others.
        """
        found = [(one, draft) for one, room in sequences.items() if len(draft := self.draft(one, room))]
        found.sort(key=lambda pair: -len(pair[1]))
        chosen: list[Redraw] = []
        while found:
            chunk = next((size for size in _CHUNKS if size > len(found[0][1])), _CHUNKS[-1])
            rows = min(_TOKENS // chunk, self._most_rows)
            rows = min(size for size in (rows, -(-rows // 2), -(-rows // 4)) if size >= min(len(found), rows))
            part, found = found[:rows], found[rows:]
            redraw = Redraw([one for one, _ in part], [draft[: chunk - 1] for _, draft in part], (rows, chunk))
            if self._pays(redraw, plain_rows):
                chosen.append(redraw)
        return chosen

    def draft(self, sequence: Sequence, room: int) -> np.ndarray:
        """Return what likely follows, int32, as deep as makes sense; empty: unknown. `room`: tokens with pages."""
        earlier, key = sequence.group.request.earlier, _key(sequence)
        none = np.zeros(0, np.int32)
        if sequence.sample >= len(earlier) or sequence.is_prefix or key in self._refused:
            return none
        text, drawn = earlier[sequence.sample], sequence.drawn
        place = self._places.setdefault(key, _Place(0, 0, True))
        if drawn > place.drawn:
            place = self._places[key] = self._follow(sequence, text, place)
        if place.shift is None:
            return none
        most = min(sequence.remaining, room, MOST) - 1
        if self.adaptive:
            most = min(most, self._acceptance[place.same].depth)
        draft = text[drawn + place.shift :][: max(0, most)]
        wrong = np.flatnonzero((draft < 0) | (draft >= self._vocab))
        return draft[: wrong[0]] if len(wrong) else draft

    def _follow(self, sequence: Sequence, text: np.ndarray, before: _Place) -> _Place:
        """Return the place after more tokens.

        The shift is as before while they are the text's, else by the last of them; where those are nowhere in the text,
        as before again if only the last token differs from it: one was replaced, and what follows has the same noise.
        """
        new, shift = sequence.tokens[len(sequence.prompt) + before.drawn :], before.shift
        old = new[:0] if shift is None else text[before.drawn + shift :][: len(new)]
        if np.array_equal(new, old):
            return before._replace(drawn=sequence.drawn)
        places, matched = longest_suffix(np.append(text, NOTHING), np.asarray(sequence.output_tokens[-CONTEXT:]))
        if matched >= _MATCH:
            shifts = places - sequence.drawn
            shift = int(shifts[np.argmin(np.abs(shifts))])
        elif not (len(old) == len(new) > 1 and np.array_equal(new[:-1], old[:-1])):
            shift = None
        return _Place(shift, sequence.drawn, False)

    def _pays(self, redraw: Redraw, plain_rows: int) -> bool:
        """Return True unless its expected tokens cost more, by what was measured, than decoding them does."""
        plain, cost = self._decoding.get(plain_rows), self._redraws.setdefault(redraw.shape, _Cost())
        if not self.adaptive or (plain is not None and cost.each < plain.each * self._expected(redraw)):
            return True
        if plain is None or (cost.count and cost.skipped < _RETRY):
            cost.skipped += 1
            return False
        cost.skipped = 0
        return True

    def _expected(self, redraw: Redraw) -> float:
        """Return the tokens that it is expected to draw: those accepted of each draft, and one more."""
        pairs = zip(redraw.sequences, redraw.drafts, strict=True)
        return sum(1 + self._acceptance[self._places[_key(one)].same].gain(len(draft)) for one, draft in pairs)

    def decoded(self, rows: int, tokens: int, seconds: float) -> None:
        """Note what a dispatch of decoding took, which compiled nothing, and the tokens that it drew."""
        if tokens:
            self._decoding.setdefault(rows, _Cost()).add(seconds, tokens)

    def measured(self, redraw: Redraw, drawn: Items[np.ndarray], seconds: float | None) -> None:
        """Note what a dispatch has brought.

        Args:
            redraw: the dispatch.
            drawn: tokens that each of its sequences drew.
            seconds: None where it compiled a program.
        """
        right = [_right(draft, tokens) for draft, tokens in zip(redraw.drafts, drawn, strict=True)]
        for name, count in zip(self.counts, (sum(map(len, redraw.drafts)), sum(right), 1), strict=True):
            self.counts[name] += count
        for same, record in self._acceptance.items():
            mine = [n for n, one in enumerate(redraw.sequences) if self._places[_key(one)].same is same]
            if mine:
                record.decay(_MEMORY)
                record.accepted += sum(right[n] for n in mine)
                record.missed += sum(right[n] < min(len(redraw.drafts[n]), len(drawn[n])) for n in mine)
        if seconds is not None:
            self._redraws.setdefault(redraw.shape, _Cost()).add(seconds, 1)

    def refuse(self, sequence: Sequence) -> None:
        """Draft no more for a sequence."""
        self._refused.add(_key(sequence))

    def forget(self, group: SequenceGroup) -> None:
        """Note a request that has ended."""
        for sequence in group.sequences:
            self._places.pop(_key(sequence), None)
            self._refused.discard(_key(sequence))


def _right(draft: np.ndarray, drawn: np.ndarray) -> int:
    """Return the tokens of a draft that were drawn, before the first that was not; the last may have ended the row."""
    size = min(len(draft), len(drawn))
    wrong = np.flatnonzero(draft[:size] != drawn[:size])
    return int(wrong[0]) if len(wrong) else size


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.group.number, sequence.sample
