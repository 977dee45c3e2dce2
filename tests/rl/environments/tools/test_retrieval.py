"""Retrieval: BM25 by its formula, and passages as a tool shows them."""

import math

import pytest

from mesh import UserError
from rl.environments.tools.bm25 import BM25
from rl.environments.tools.retrieval import RetrievalTool
from rl.tasks.rows.sources import RowFunction

TEXTS = ("The cat sat.", "A dog sat on the cat", "Fish swim; fish eat fish.", "")


def corpus():
    return [{"title": f"t{n}", "text": text} for n, text in enumerate(TEXTS)]


def test_scores_are_those_of_the_formula():
    index = BM25(TEXTS)
    (number, score), *others = index.search("FISH", 3)
    mean = (3 + 6 + 5 + 0) / 4
    expected = math.log(1 + 3.5 / 1.5) * 3 * 2.2 / (3 + 1.2 * (0.25 + 0.75 * 5 / mean))
    assert (number, others) == (2, []) and score == pytest.approx(expected)
    assert [number for number, _ in index.search("the cat", 5)] == [0, 1]  # the shorter first
    assert index.search("unicorn", 3) == [] and BM25([]).search("cat", 1) == []


def test_passages_are_shown_with_their_headings():
    cfg = RetrievalTool.Config(rows=RowFunction.Config(function=corpus), heading="title", passages=2)
    tool = cfg.build()
    assert tool.call(query="cat") == "t0\nThe cat sat.\n\nt1\nA dog sat on the cat"
    assert tool.call(query="t2") == "t2\nFish swim; fish eat fish."
    assert tool.call(query="unicorn") == "nothing found"
    with pytest.raises(UserError, match="row 0 has no text 'txt'.*text"):
        cfg.clone(text="txt").build()
