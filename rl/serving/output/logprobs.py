"""Log-probabilities in the forms of the protocol: of completions, of chats, and of prompts as vLLM writes them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.rollout.decoding.scores import TokenScores

Json = dict[str, Any]
_NEVER = -1e20  # less is the log-probability of tokens that cannot be drawn


class LogprobWriter:
    """Form of the log-probabilities of tokens with `alternatives` each; `as_ids`: words are `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int, as_ids: bool = False):
        self._tokenizer, self._alternatives, self._as_ids = tokenizer, alternatives, as_ids

    def completion(
        self, ids: Sequence[int], values: Iterable[float | None], offsets: list[int], scores: TokenScores | None
    ) -> Json:
        """Return the object of `/v1/completions`; alternatives are those and the token itself.

        Of tokens with the same text the likeliest is named: parts of characters have the same.
        """
        found: list[Json | None] = []
        if self._alternatives:
            found += [None] * (len(ids) - (0 if scores is None else len(scores)))  # the first token of a prompt
            for token, logprob, top in zip(ids[len(found) :], *self._rows(scores), strict=True):
                by_word: Json = {}
                for other, value in [*top, (token, logprob)]:
                    by_word.setdefault(self._word(other), value)
                found.append(by_word)
        words, values = list(map(self._word, ids)), [None if value is None else float(value) for value in values]
        return {
            "tokens": words,
            "token_logprobs": values,
            "text_offset": offsets,
            "top_logprobs": found if self._alternatives else None,
        }

    def chat(self, ids: Sequence[int], values: Iterable[float], scores: TokenScores | None) -> Json:
        """Return the object of `/v1/chat/completions`."""
        tops = [[]] * len(ids) if scores is None else self._rows(scores)[1]
        content = [
            {**self._entry(token, float(value)), "top_logprobs": [self._entry(*one) for one in top]}
            for token, value, top in zip(ids, values, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def prompt(self, ids: Sequence[int], scores: TokenScores | None) -> list[Json | None]:
        """Return vLLM's `prompt_logprobs`: of each token but the first, it and the alternatives by id, with ranks."""
        found: list[Json | None] = [None]
        for index, (token, logprob, top) in enumerate(zip(ids[1:], *self._rows(scores), strict=True)):
            assert scores is not None
            ranked = [(other, value, rank) for rank, (other, value) in enumerate(top, 1)]
            if token not in dict(top):
                ranked.append((token, logprob, int(scores.ranks[index])))
            found.append(
                {
                    str(other): {"logprob": value, "rank": rank, "decoded_token": _text(self._tokenizer, other)}
                    for other, value, rank in ranked
                }
            )
        return found

    def _rows(self, scores: TokenScores | None) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """Return each token's log-probability, and its alternatives that could be drawn."""
        if scores is None:
            return [], []
        ids = scores.tokens[:, : self._alternatives].tolist()
        values = scores.top_logprobs[:, : self._alternatives].tolist()
        rows = [zip(*row, strict=True) for row in zip(ids, values, strict=True)]
        return scores.logprobs.tolist(), [[one for one in row if one[1] > _NEVER] for row in rows]

    def _entry(self, token: int, logprob: float) -> Json:
        # Part of a character has no text of its own; its bytes, joined to those of its neighbours, have.
        return {"token": self._word(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}

    def _word(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else _text(self._tokenizer, token)


def values_of(logprobs: np.ndarray, scores: TokenScores | None) -> np.ndarray:
    """Return the log-probabilities of tokens that a client sees: those of their alternatives, if there are any."""
    return logprobs if scores is None else scores.logprobs


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")
