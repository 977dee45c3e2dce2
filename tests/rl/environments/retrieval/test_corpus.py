"""BM25 by its formula, and parts of an index against an index of the part alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.environments.retrieval.bm25 import BM25, rank

TEXTS = ("The cat sat.", "A dog sat on the cat", "Fish swim; fish eat fish.", "")


def test_scores_are_those_of_the_formula():
    index = BM25(TEXTS)
    (number, score), *others = index.search("FISH", 3)
    mean = (3 + 6 + 5 + 0) / 4
    expected = math.log(1 + 3.5 / 1.5) * 3 * 2.2 / (3 + 1.2 * (0.25 + 0.75 * 5 / mean))
    assert (number, others) == (2, []) and score == pytest.approx(expected)
    assert [number for number, _ in index.search("the cat", 5)] == [0, 1]  # the shorter first
    assert index.search("unicorn", 3) == [] and BM25([]).search("cat", 1) == []


TEXT = st.lists(st.sampled_from("ant bee cat dog eel".split()), max_size=6).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=12), st.lists(TEXT, max_size=4), TEXT)
def test_what_is_seen_ranks_as_an_index_of_it_alone(texts: list[tuple[str, bool]], own: list[str], query: str):
    seen = [number for number, (_, visible) in enumerate(texts) if visible]
    alone = BM25([texts[number][0] for number in seen] + own)
    expected = [((0, seen[n]) if n < len(seen) else (1, n - len(seen)), score) for n, score in alone.search(query, 20)]
    parts = [(BM25([text for text, _ in texts]), np.asarray(seen, np.int64)), (BM25(own), None)]
    assert [((part, number), score) for part, number, score in rank(query, 20, parts)] == expected
