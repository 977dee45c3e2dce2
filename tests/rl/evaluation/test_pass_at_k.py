"""pass@k equals the enumeration of all subsets; its intervals cover the truth as they say."""

import itertools
import math

import numpy as np
import pytest

from rl.evaluation.pass_at_k import ProblemResult, is_correct, pass_at_k, summarise
from rl.protocol.messages import Score


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples: int):
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased():
    p, samples, k = 0.3, 10, 4
    expected = sum(
        math.comb(samples, c) * p**c * (1 - p) ** (samples - c) * pass_at_k(samples, c, k) for c in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_large_counts_stay_exact():
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_at_k(10_000, 1, 1) == 1e-4


@pytest.mark.parametrize("arguments", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(arguments: tuple[int, int, int]):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(*arguments)


def solved(problem_id: int, family: str, correct: int) -> ProblemResult:
    """Return the result of a problem of whose 8 samples so many are correct."""
    return ProblemResult(problem_id, family, [n < correct for n in range(8)], ["x"] * 8)


def test_only_full_marks_of_a_verifier_that_finished_count():
    assert is_correct(Score(1.0))
    assert not is_correct(Score(0.99))
    assert not is_correct(Score(1.0, "timeout"))


def test_the_summary_has_the_agreed_shape_and_values():
    results = [solved(i, "a", i % 2 * 8) for i in range(10)]
    results += [solved(100 + i, "b", 2) for i in range(4)]
    summary = summarise(results)
    assert (summary["problems"], summary["samples"]) == (14, 112)
    assert summary["families"]["a"]["pass@1"] == 0.5
    assert summary["families"]["b"]["pass@1"] == 0.25
    assert summary["families"]["b"]["pass@8"] == 1.0
    assert summary["families"]["b"]["pass@1_ci"] == [0.25, 0.25]
    assert summary["pass@1"] == pytest.approx(0.375)  # of the families, not of the problems
    assert summary["pass@8"] == pytest.approx(0.75)
    low, high = summary["families"]["a"]["pass@1_ci"]
    assert 0.1 <= low < 0.5 < high <= 0.9
    assert summary["pass@1_ci"] == pytest.approx([(low + 0.25) / 2, (high + 0.25) / 2])
    keys = {"pass@1", "pass@8", "pass@1_ci", "pass@8_ci", "problems", "samples"}
    assert summary.keys() == keys | {"families"}
    assert summary["families"]["a"].keys() == keys


def test_the_seed_decides_the_interval_and_other_families_do_not():
    results = [solved(i, "a", i % 5) for i in range(30)]
    other = [solved(100 + i, "b", i % 3) for i in range(9)]
    assert summarise(results, seed=1) == summarise(results, seed=1)
    intervals = [summarise(results, seed=s, resamples=20)["pass@1_ci"] for s in (1, 2)]
    assert intervals[0] != intervals[1]
    both = summarise(results + other, seed=1)
    assert both["families"]["a"] == summarise(results, seed=1)["families"]["a"]


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        rates = rng.beta(1.0, 2.0, size=60)  # problems of different difficulty; the mean is 1/3
        results = [solved(i, "a", int(c)) for i, c in enumerate(rng.binomial(8, rates))]
        low, high = summarise(results, ks=(1,), resamples=300, seed=trial)["pass@1_ci"]
        covered += low <= 1 / 3 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_results_that_cannot_be_summarised_are_refused():
    one = solved(1, "a", 1)
    with pytest.raises(ValueError, match="no results"):
        summarise([])
    with pytest.raises(ValueError, match="problem 1 occurs twice"):
        summarise([one, one])
    with pytest.raises(ValueError, match="pass@16 cannot be estimated from 8 samples"):
        summarise([one], ks=(16,))
