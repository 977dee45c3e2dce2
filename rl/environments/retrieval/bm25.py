"""Ranking of texts by words: Okapi BM25 (Robertson and Zaragoza, 2009), with the defaults k1 = 1.2 and b = 0.75.

Counts are kept by text, and weights follow from the texts that a search may see: who sees a part of an index finds what
an index of that part alone would find, to the order, so that rarity of a word tells nothing of others' texts.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rl.environments.retrieval.clusters import Array
from rl.tasks.curation.words import words

Part = tuple["BM25", Array | None]  # an index, and the ascending numbers of its texts that are seen; None: all
_NONE = (np.zeros(0, np.int32), np.zeros(0, np.int32))


class BM25:
    """An index of texts."""

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75):
        """Count the words of the texts; rare words weigh more, long texts less."""
        self.k1, self.b = k1, b
        counts = [Counter(words(text)) for text in texts]
        self.lengths = np.array([count.total() for count in counts], np.int64)
        places: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, found in count.items():
                places.setdefault(word, []).append((number, found))
        self._postings = {word: np.array(pairs, np.int32).T for word, pairs in places.items()}

    def search(self, query: str, count: int, seen: Array | None = None) -> list[tuple[int, float]]:
        """Return (number of the text, score) of the best of those seen, best first; among equals the first text."""
        return [(number, score) for _, number, score in rank(query, count, [(self, seen)])]

    def postings(self, word: str, seen: Array | None) -> tuple[Array, Array]:
        """Return the texts with a word among those seen, ascending, and how often each has it."""
        numbers, found = self._postings.get(word, _NONE)
        if seen is not None:
            kept = np.isin(numbers, seen, assume_unique=True)
            numbers, found = numbers[kept], found[kept]
        return numbers, found


def rank(query: str, count: int, parts: Sequence[Part]) -> list[tuple[int, int, float]]:
    """Return (part, number of the text, score) of the best texts of several indices, weighed as if they were one."""
    lengths = [index.lengths if seen is None else index.lengths[seen] for index, seen in parts]
    texts = sum(map(len, lengths))
    mean = sum(int(each.sum()) for each in lengths) / max(texts, 1) or 1.0
    scores = [np.zeros(len(index.lengths)) for index, _ in parts]
    for word, times in Counter(words(query)).items():
        postings = [index.postings(word, seen) for index, seen in parts]
        holding = sum(len(numbers) for numbers, _ in postings)
        weight = times * math.log(1 + (texts - holding + 0.5) / (holding + 0.5))
        for total, (index, _), (numbers, found) in zip(scores, parts, postings, strict=True):
            scale = index.k1 * (1 - index.b + index.b * index.lengths[numbers] / mean)
            total[numbers] += weight * (found * (index.k1 + 1) / (found + scale))
    best: list[tuple[int, int, float]] = []
    for part, total in enumerate(scores):
        holders = np.flatnonzero(total)
        first = holders[np.argsort(-total[holders], kind="stable")[:count]].tolist()
        best += [(part, number, float(total[number])) for number in first]
    return sorted(best, key=lambda one: -one[2])[:count]
