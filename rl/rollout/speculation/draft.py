"""Drafts: tokens that a sequence may go on with, and how they are found in other texts."""

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import numpy as np

from rl.rollout.sequence import Sequence, SequenceGroup

NOTHING = -1  # stands for a token: the end of a text
CONTEXT = 8  # last tokens of a sequence, by which a step finds its place in the text of a draft


class Draft(NamedTuple):
    """A drafter's guess of what a sequence goes on with."""

    tokens: np.ndarray  # int32, the expected continuation; empty: none is better than another
    matched: int  # tokens before it, in the text where it was found, that are the sequence's own last ones
    # int32, where a step may find another one when the sequence has left this; the end is the best of it
    text: np.ndarray


class Drafter(Protocol):
    """A source of drafts. What it proposes costs or saves time, and changes no result."""

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        """Return a draft with a continuation of up to `count` tokens; None: there is no text to find one in."""
        ...

    def remember(self, group: SequenceGroup) -> None:
        """Note a request that has ended, with all its completions."""
        ...


def longest_suffix(text: np.ndarray, recent: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the places in `text` that follow its longest matches with the end of `recent`, and their length.

    A suffix tree of this depth gives the same answer. Building one in Python takes microseconds for every token that
    any sequence draws; this scan takes about one for 4,000 tokens of text, and only when a draft is wanted.

    Args:
        text: int32, of several texts with `NOTHING` in between.
        recent: the last tokens of a sequence; its length is the longest match that is looked for.
    """
    if not len(recent) or not len(text):
        return np.zeros(0, np.int64), 0
    places, matched = np.flatnonzero(text[:-1] == recent[-1]) + 1, 1
    places = places[text[places] != NOTHING]
    while len(places) and matched < len(recent):
        longer = places[places > matched]
        longer = longer[text[longer - matched - 1] == recent[-matched - 1]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    return places, matched if len(places) else 0


def continuation(text: np.ndarray, recent: np.ndarray, count: int) -> Draft:
    """Return what follows the longest match of `recent` in `text`; of several, the latest of the most frequent."""
    places, matched = longest_suffix(text, recent)
    if not len(places):
        return Draft(np.zeros(0, np.int32), 0, text)
    _, inverse, votes = np.unique(text[places], return_inverse=True, return_counts=True)
    place = int(places[np.lexsort((places, votes[inverse]))[-1]])
    return Draft(text[place : place + count], matched, text)


def as_row(own: Items[int], drafts: Items[Draft], count: int) -> np.ndarray:
    """Return drafts as a dispatch takes them, int32 [count].

    The sequence's last `CONTEXT` tokens, the continuation with the longest match, and, behind a gap, the end of all
    texts, the first draft's last. `NOTHING` elsewhere.
    """
    row, recent = np.full(count, NOTHING, np.int32), own[-CONTEXT:]
    row[CONTEXT - len(recent) : CONTEXT] = recent
    best = max(drafts, key=lambda draft: draft.matched)
    room = (count - CONTEXT) // 4 if any(len(draft.text) for draft in drafts) else count - CONTEXT
    part = best.tokens[: max(1, room)]
    row[CONTEXT : CONTEXT + len(part)] = part
    at = CONTEXT + len(part) + 1
    rest = np.concatenate([[NOTHING], *(part for draft in reversed(drafts) for part in ([NOTHING], draft.text))])
    if (left := count - at) > 0:
        row[max(at, count - len(rest)) :] = rest[-left:]
    return row
