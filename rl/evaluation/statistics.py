"""Figures of an evaluation beyond pass@k: majority votes, intervals of proportions, and pairs of policies."""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

_RESAMPLES = 10_000
_TAIL = 100 * (1 - 0.95) / 2
INTERVAL = (_TAIL, 100 - _TAIL)  # percentiles of a bootstrap


def wilson(correct: float, count: int) -> list[float]:
    """Return Wilson's 95 % score interval of a proportion (1927; ValueError: no trials, or more successes)."""
    if count < 1 or not 0 <= correct <= count:
        raise ValueError(f"{correct} of {count}: a proportion of one trial or more is needed")
    z = NormalDist().inv_cdf(0.975)
    share = correct / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low = max(0.0, (centre - spread) / scale) if correct else 0.0  # exactly: rounding leaves 1e-17
    high = min(1.0, (centre + spread) / scale) if correct < count else 1.0
    return [low, high]


def majority(votes: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Return maj@k: the chance that the most frequent of k answers is right; answers that tie share it.

    The mean over all k-subsets of the samples, counted exactly. Answers with no vote ("") are abstentions: they never
    win against one that has any.

    Raises:
        ValueError: k is not in 1..samples.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} cannot be estimated from {n} samples: 1 <= k <= samples is needed")
    right = {vote for vote, ok in zip(votes, correct, strict=True) if ok and vote}
    counts = Counter(vote for vote in votes if vote)
    groups = [[count for vote, count in counts.items() if (vote in right) is is_right] for is_right in (True, False)]
    rest = [math.comb(n - counts.total(), size) for size in range(k + 1)]  # choices of abstentions
    won = Fraction(0)
    for most in range(1, min(k, max(groups[0], default=0)) + 1):
        winners, losers = (_with_most(sizes, most, k) for sizes in groups)
        for a in range(1, len(winners)):
            for b in range(len(losers)):
                ways = _product(_product(winners[a], losers[b], k), rest, k)[k]
                won += Fraction(a * ways, a + b)
    return float(won / math.comb(n, k))


def _with_most(sizes: Sequence[int], most: int, k: int) -> list[list[int]]:
    """Count, [t][s], subsets of s samples, at most k, in which t votes of `sizes` occur `most` times, none more."""
    found = [[1] + [0] * k] + [[0] * (k + 1) for _ in range(k // most)]
    for size in sizes:
        fewer = [math.comb(size, count) for count in range(most)]
        top = [0] * most + [math.comb(size, most)]
        fresh = [_product(one, fewer, k) for one in found]
        if top[most]:
            for t in range(1, len(found)):
                more = _product(found[t - 1], top, k)
                fresh[t] = [x + y for x, y in zip(fresh[t], more, strict=True)]
        found = fresh
    return found


def _product(first: Sequence[int], second: Sequence[int], k: int) -> list[int]:
    """Return the coefficients 0 to k of the product of two polynomials."""
    both = np.convolve(np.array(first, object), np.array(second, object)).tolist()[: k + 1]
    return both + [0] * (k + 1 - len(both))


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: of pairs that differ, one side wins half by chance."""
    count = first_only + second_only
    if count == 0:
        return 1.0
    tail = sum(math.comb(count, i) for i in range(min(first_only, second_only) + 1))
    return min(1.0, 2 * tail / 2**count)


def compare(first: Sequence[Sequence[bool]], second: Sequence[Sequence[bool]], *, seed: int = 0) -> dict[str, Any]:
    """Compare two policies on the same problems, whose samples are `first[i]` and `second[i]`.

    Returns:
        {"problems", "first", "second" (their pass@1), "difference" (second - first), "difference_ci" (paired bootstrap
        over problems), "unpaired_problems" (see there), "first_only", "second_only" (problems whose first sample only
        one solves), "mcnemar_p"}.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} problems: pairs of the same problems are needed")
    means = np.array([[np.mean(a), np.mean(b)] for a, b in zip(first, second, strict=True)], np.float64)
    differences = means[:, 1] - means[:, 0]
    rng, size = np.random.default_rng(seed), (100, len(differences))
    replicas = [differences[rng.integers(len(differences), size=size)].mean(axis=1) for _ in range(_RESAMPLES // 100)]
    only = [sum(a[0] and not b[0] for a, b in zip(x, y, strict=True)) for x, y in ((first, second), (second, first))]
    return {
        "problems": len(differences),
        "first": float(means[:, 0].mean()),
        "second": float(means[:, 1].mean()),
        "difference": float(differences.mean()),
        "difference_ci": [float(x) for x in np.percentile(np.concatenate(replicas), INTERVAL)],
        "unpaired_problems": unpaired_problems(means),
        "first_only": only[0],
        "second_only": only[1],
        "mcnemar_p": mcnemar(*only),
    }


def unpaired_problems(means: np.ndarray) -> int | None:
    """Return the problems with which two independent sets of problems show a difference as well as these pairs.

    The variance of a mean difference of n pairs is Var(b - a) / n; of two sets of m problems, (Var(a) + Var(b)) / m.

    Args:
        means: pass@1 of both policies on each problem, float64 [n, 2].

    Returns:
        The least m; None where all differences are equal, or there is one problem.
    """
    if len(means) < 2 or not (paired := float(np.var(means[:, 1] - means[:, 0], ddof=1))):
        return None
    return math.ceil(len(means) * float(np.var(means, axis=0, ddof=1).sum()) / paired - 1e-9)
