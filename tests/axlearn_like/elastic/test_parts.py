"""The fixed tree: each share of the parts gives the same sum, to the bit."""

import random

import numpy as np
import pytest

from axlearn_like.elastic.parts import Node, fold, nodes, share


@pytest.mark.parametrize("parts", [1, 2, 5, 8, 13])
def test_sums_do_not_depend_on_how_many_members_share_the_parts(parts: int):
    # Sizes far apart: another order of additions gives other bits.
    leaves = np.random.default_rng(parts).normal(size=(parts, 50)) * 10.0 ** np.arange(parts)[:, None]
    values = leaves.astype(np.float32)
    whole = fold((0, parts), lambda node: values[node[0]] if node[1] - node[0] == 1 else None, np.add)
    for members in range(1, parts + 1):
        have: dict[Node, np.ndarray] = {}
        for member in random.Random(members).sample(range(members), members):
            mine = share(parts, member, members)
            assert len(mine) in (parts // members, parts // members + 1)
            for node in nodes(parts, mine):
                have[node] = fold(node, lambda n: values[n[0]] if n[1] - n[0] == 1 else None, np.add)
        np.testing.assert_array_equal(fold((0, parts), have, np.add), whole)
    if parts >= 8:
        assert (np.cumsum(values, axis=0)[-1] != whole).any(), "any order would do"


def test_a_part_that_nobody_has_is_named():
    with pytest.raises(KeyError, match="part 3"):
        fold((0, 4), {(0, 2): 1.0, (2, 3): 1.0}, lambda a, b: a + b)
