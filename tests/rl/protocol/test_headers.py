"""The tree of rollouts against a trie that is built token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl.protocol.token_tree import token_tree

rollouts = st.lists(st.lists(st.sampled_from([0, 1, 300, 70_000]), max_size=6), max_size=7)


def common(one: list[int], other: list[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return next((i for i, equal in enumerate(same) if not equal), len(same))


@given(rollouts, st.sets(st.integers(0, 6)))
def test_what_rollouts_share_and_the_tokens_of_some(tokens: list[list[int]], chosen: set[int]):
    tree = token_tree([np.asarray(one, np.int32) for one in tokens])
    assert sorted(tree.order) == list(range(len(tokens)))
    assert [tokens[n] for n in tree.order] == sorted(tokens), "a beginning comes before what continues it"
    expected = [[0 if a == b else common(tokens[a], tokens[b]) for b in tree.order] for a in tree.order]
    order = np.asarray(tree.order, int)
    np.testing.assert_array_equal(tree.shared()[order][:, order], np.reshape(expected, (len(order),) * 2))
    some = {n: len(tokens[n]) for n in chosen if n < len(tokens)}
    assert tree.distinct(some) == len({tuple(tokens[n][: i + 1]) for n in some for i in range(some[n])})


@given(rollouts)
def test_families_are_those_of_one_first_token_the_longest_first(tokens: list[list[int]]):
    tree, sizes = token_tree([np.asarray(one, np.int32) for one in tokens]), {n: len(t) for n, t in enumerate(tokens)}
    families = tree.families(sizes)
    assert sorted(n for family in families for n in family) == list(sizes)
    assert all(len({tuple(tokens[n][:1]) for n in family}) == 1 for family in families)
    longest = [max(sizes[n] for n in family) for family in families]
    assert longest == sorted(longest, reverse=True)
