"""Constraints of a sequence: tokens that it may draw next, and what ends it beside stop tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.rollout.decoding.grammar import Matcher
from rl.rollout.decoding.stop_strings import StopText, check_strings
from rl.rollout.request import Request, StopConditions


class Constraints:
    """Stop strings, a least length and a grammar. `drawn`: tokens of the completion so far.

    Attributes:
        free: the next dispatch is that of a request without any of them, as it is for most.
    """

    def __init__(self, request: Request, stop: StopConditions):
        self._request, self._stop = request, stop
        self._matcher: Matcher | None = None if request.grammar is None else request.grammar.start()
        self.free = request.grammar is None and request.scores is None and stop.min_new_tokens == 0
        self._text: StopText | None = None
        self._searched = 0  # completion tokens in which no stop string was found

    def search(self, strings: Sequence[str], decode: Callable[[Any], str] | None, drawn: int, where: str) -> None:
        """Search for the request's stop strings and these, from here on (UserError: they cannot be searched for)."""
        check_strings(strings, has_text=decode is not None, where=where)
        strings = (*self._stop.strings, *strings)
        self._text = StopText(strings, decode) if strings and decode is not None else None
        self._searched = drawn

    def find_stop(self, completion: Sequence[int]) -> int | None:
        """Return the number of tokens behind which a stop string ends the completion; None: it goes on."""
        if self._text is None:
            return None
        kept = self._text.find(completion, max(self._searched, self._stop.min_new_tokens))
        self._searched = len(completion)
        return kept

    @property
    def masked(self) -> bool:
        """True if other tokens may be drawn after each one."""
        return self._matcher is not None

    def at_once(self, drawn: int, remaining: int) -> int:
        """Return how many of the remaining tokens the next dispatch may draw: those with the same tokens banned."""
        short = self._stop.min_new_tokens - drawn
        remaining = min(remaining, short) if short > 0 else remaining
        return min(remaining, 1) if self.masked else remaining

    def needs_tables(self, drawn: int) -> bool:
        """Return True if the next dispatch must have arrays of the vocabulary, whatever the sampler is."""
        return self.masked or self._request.scores is not None or drawn < self._stop.min_new_tokens

    def ban(self, bias_v: np.ndarray, drawn: int, never: float) -> None:
        """Write `never` to the biases of tokens that the next dispatch must not draw.

        Stop tokens are banned while the grammar does not allow an end. Where it allows nothing else, a least length
        gives way, and a word that the request made a stop token ends the completion.
        """
        stops = np.array(self._stop.tokens, np.int64)
        allowed = np.ones(len(bias_v), bool)
        if self._matcher is not None:
            words, may_end = self._matcher.allowed()
            allowed[:] = False
            allowed[: len(words)] = words
            if may_end or np.delete(allowed, stops).any():
                allowed[stops] = may_end
        elif drawn >= self._stop.min_new_tokens:
            return
        if drawn < self._stop.min_new_tokens and np.delete(allowed, stops).any():
            allowed[stops] = False
        bias_v[~allowed] = never

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on behind drawn tokens; returns True if the grammar allows nothing more (GrammarError: it cannot)."""
        if self._matcher is None:
            return False
        return self._matcher.advance([token for token in tokens if token not in self._stop.tokens])
