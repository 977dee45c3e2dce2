"""Majority votes against all subsets, intervals against their definition, paired tests against the binomial."""

import itertools
import math

import numpy as np
import pytest

from rl.evaluation.statistics import compare, majority, mcnemar, wilson


def test_wilsons_interval_solves_its_equation_and_stays_in_0_to_1():
    for correct, count in ((0, 5), (3, 10), (10, 10), (131, 1319)):
        low, high = wilson(correct, count)
        assert 0 <= low <= correct / count <= high <= 1
        for bound in (low, high):  # |p - share| = z sqrt(p (1 - p) / n)
            if 0 < bound < 1:
                assert abs(bound - correct / count) == pytest.approx(
                    1.959964 * math.sqrt(bound * (1 - bound) / count), rel=1e-5
                )
    assert wilson(3, 10) == pytest.approx([0.10779, 0.60322], abs=1e-5)  # Newcombe 1998 gives 0.108 to 0.603
    with pytest.raises(ValueError, match="one trial or more"):
        wilson(0, 0)


def test_majority_is_the_mean_over_all_subsets_and_ties_share():
    votes, correct = ["a", "b", "a", "c", "", "b"], [True, False, True, False, False, False]
    for k in range(1, 7):
        values = []
        for subset in itertools.combinations(range(6), k):
            cast = [votes[i] for i in subset if votes[i]]
            most = max((cast.count(v) for v in cast), default=0)
            tied = {v for v in cast if cast.count(v) == most}
            values.append(("a" in tied) / len(tied) if tied else 0.0)
        assert majority(votes, correct, k) == pytest.approx(np.mean(values))
    assert majority(votes, correct, 1) == pytest.approx(2 / 6)
    assert majority(["", ""], [True, True], 2) == 0.0
    many = ["a"] * 20 + ["b"] * 12
    ways = sum(math.comb(20, a) * math.comb(12, 9 - a) for a in range(5, 10))  # hypergeometric: more than half of 9
    assert majority(many, [v == "a" for v in many], 9) == pytest.approx(ways / math.comb(32, 9))
    spread = [str(n) for n in range(60)]
    assert majority(spread, [v == "7" for v in spread], 30) == pytest.approx(0.5 / 30)  # there, one of 30 that tie
    with pytest.raises(ValueError, match="1 <= k <= samples"):
        majority(["a"], [True], 2)


def test_pairs_are_compared_by_problem_and_the_same_policy_differs_by_nothing():
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    first = [[bool(x < 0.3 + 0.4 * h) for x in rng.random(4)] for h in hard]
    better = [[a or bool(x < 0.2) for a, x in zip(row, rng.random(4), strict=True)] for row in first]
    found = compare(first, better)
    assert found["first_only"] == 0 and found["second_only"] > 5 and found["mcnemar_p"] < 1e-3
    low, high = found["difference_ci"]
    assert 0 < low < found["difference"] < high and found["difference"] == pytest.approx(
        found["second"] - found["first"]
    )
    unpaired = 1.96 * math.sqrt(2 * 0.25 / 200)
    assert high - low < unpaired  # pairing takes out how hard the problems are
    same = compare(first, first)
    assert (same["difference"], same["difference_ci"], same["mcnemar_p"]) == (0.0, [0.0, 0.0], 1.0)
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 1024) and mcnemar(0, 0) == 1.0
    with pytest.raises(ValueError, match="pairs of the same problems"):
        compare(first, first[:-1])


@pytest.mark.slow
def test_unpaired_problems_are_those_of_equal_variance_and_what_paired_intervals_cover():
    """Against numpy's own variances; and of 300 pairs of samples the interval of the pairs holds the truth in 95 %."""
    rng = np.random.default_rng(3)
    hard, covered, wide = rng.random(60), 0, list[float]()
    for _ in range(300):
        noise = rng.random((60, 4))  # the same for both policies
        problems = rng.choice(hard, 60)[:, None]
        first, second = noise < 0.2 + 0.6 * problems, noise < 0.25 + 0.6 * problems
        found = compare(first.tolist(), second.tolist())
        low, high = found["difference_ci"]
        covered += low <= 0.05 <= high
        means = np.stack([first.mean(1), second.mean(1)], axis=1, dtype=np.float64)
        needed = 60 * (means[:, 0].var(ddof=1) + means[:, 1].var(ddof=1)) / (means[:, 1] - means[:, 0]).var(ddof=1)
        assert found["unpaired_problems"] == math.ceil(needed - 1e-6)
        wide.append(found["unpaired_problems"])
    assert 0.88 <= covered / 300 <= 0.99
    assert np.median(wide) > 5 * 60
    assert compare(first.tolist(), first.tolist())["unpaired_problems"] is None
    apart = compare((rng.random((4000, 1)) < 0.5).tolist(), (rng.random((4000, 1)) < 0.5).tolist())
    assert apart["unpaired_problems"] == pytest.approx(4000, rel=0.1), "pairs that have nothing in common save nothing"
