"""A small trained tokenizer: bytes, and one token for each phrase that recurs in the training texts.

Task families ask the same question with other numbers. Reading "State the final answer to the following arithmetic
problem: " as one token instead of sixty makes every stage of a small run several times cheaper, and leaves digits and
letters, which the answer depends on, as single bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from axlearn_like.tokenizers.bytes import ByteTokenizer


class PhraseTokenizer(ByteTokenizer):
    """Ids 0 to 258 as `ByteTokenizer`; 259 + i is `phrases[i]`. At each place the longest phrase wins."""

    class Config(ByteTokenizer.Config):
        phrases: tuple[str, ...] = ()
        vocab_size: int = 272

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        first = self.pad + 1
        if first + len(cfg.phrases) > cfg.vocab_size:
            raise ValueError(
                f"PhraseTokenizer.Config: {len(cfg.phrases)} phrases need a vocab_size of at least "
                f"{first + len(cfg.phrases)}, got {cfg.vocab_size}"
            )
        if len(set(cfg.phrases)) < len(cfg.phrases) or "" in cfg.phrases:
            raise ValueError("PhraseTokenizer.Config.phrases must be distinct and not empty")
        self._ids = {phrase: first + i for i, phrase in enumerate(cfg.phrases)}
        self._texts = {i: phrase.encode() for phrase, i in self._ids.items()}
        longest_first = sorted(cfg.phrases, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if cfg.phrases else None

    def encode(self, text: str) -> list[int]:
        """Ids of phrases where they occur, of bytes elsewhere."""
        if self._split is None:
            return super().encode(text)
        ids: list[int] = []
        for piece in self._split.split(text):
            ids += [self._ids[piece]] if piece in self._ids else super().encode(piece)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special and unused ids are dropped."""
        expanded: list[int] = []
        for i in ids:
            expanded += self._texts.get(i, (i,))
        return super().decode(expanded)


def learn_phrases(texts: Sequence[str], max_phrases: int, min_share: float = 0.05) -> tuple[str, ...]:
    """The runs of whole words that save most tokens, greedily, each in at least `min_share` of the texts.

    A run ends with the blank behind it, if there is one, so that what follows starts at a token of its own. Runs with
    digits are left alone: "(7.0 + " may recur, but a model computes with digits it sees one by one.
    """
    pieces: list[list[str]] = [[text] for text in texts]
    found: list[str] = []
    least = max(2, round(min_share * len(texts)))
    while len(found) < max_phrases:
        counts: Counter[str] = Counter()
        for parts in pieces:
            counts.update({run for part in parts for run in _runs(part)})
        best = max(
            (run for run, count in counts.items() if count >= least),
            key=lambda run: (counts[run] * (len(run.encode()) - 1), run),
            default=None,
        )
        if best is None:
            break
        found.append(best)
        pieces = [[rest for part in parts for rest in part.split(best) if rest] for parts in pieces]
    return tuple(found)


def _runs(text: str) -> set[str]:
    """Every run of whole words of a text that is at least three characters long and holds no digit."""
    words = re.findall(r"\S+\s*", text)
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    return {run for run in runs if len(run) >= 3 and not re.search(r"\d", run)}
