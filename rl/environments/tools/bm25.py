"""Ranking of texts by words: Okapi BM25 (Robertson and Zaragoza, 2009), with the defaults k1 = 1.2 and b = 0.75."""

import heapq
import math
from collections import Counter
from collections.abc import Sequence

from rl.tasks.curation.words import words


class BM25:
    """An index of texts."""

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75):
        """Count the words of the texts; rare words weigh more, long texts less."""
        self._postings: dict[str, list[tuple[int, float]]] = {}
        counts = [Counter(words(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            scale = k1 * (1 - b + b * length / mean)
            for word, found in count.items():
                self._postings.setdefault(word, []).append((number, found * (k1 + 1) / (found + scale)))
        self._weights = {
            word: math.log(1 + (len(texts) - len(places) + 0.5) / (len(places) + 0.5))
            for word, places in self._postings.items()
        }

    def search(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return (number of the text, score) of the best, best first; among equals the first text."""
        scores: dict[int, float] = {}
        for word, times in Counter(words(query)).items():
            for number, share in self._postings.get(word, ()):
                scores[number] = scores.get(number, 0.0) + times * self._weights[word] * share
        return heapq.nsmallest(count, scores.items(), key=lambda found: (-found[1], found[0]))
