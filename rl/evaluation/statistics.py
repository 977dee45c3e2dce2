"""Figures of an evaluation beyond pass@k: majority votes, intervals of proportions, and pairs of policies."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np

__all__ = ["compare", "majority", "mcnemar", "wilson"]

_EXACT = 4096  # subsets of the samples that are all looked at; of more, so many are drawn
_RESAMPLES = 10_000


def wilson(correct: float, count: int, confidence: float = 0.95) -> list[float]:
    """Return Wilson's score interval of a proportion of independent trials (Wilson 1927).

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    if count < 1 or not 0 <= correct <= count:
        raise ValueError(f"{correct} of {count}: a proportion of one trial or more is needed")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low = max(0.0, (centre - spread) / scale) if correct else 0.0  # exactly: rounding leaves 1e-17
    high = min(1.0, (centre + spread) / scale) if correct < count else 1.0
    return [low, high]


def majority(votes: Sequence[str], correct: Sequence[bool], k: int, seed: int = 0) -> float:
    """Return maj@k: the chance that the most frequent of k answers is right; answers that tie share it.

    The mean over all k-subsets of the samples, or over 4,096 drawn ones where there are more. Answers with no vote ("")
    are abstentions: they never win against one that has any.

    Raises:
        ValueError: k is not in 1..samples.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} cannot be estimated from {n} samples: 1 <= k <= samples is needed")
    right = dict.fromkeys(votes, False) | {vote: True for vote, ok in zip(votes, correct, strict=True) if ok}
    if k == n:
        return _winner(votes, right)
    rng = np.random.default_rng([seed, n, k])
    if math.comb(n, k) <= _EXACT:
        subsets: Iterable[Sequence[int]] = combinations(range(n), k)
    else:
        subsets = (rng.permutation(n)[:k].tolist() for _ in range(_EXACT))
    return float(np.mean([_winner([votes[i] for i in subset], right) for subset in subsets]))


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: of pairs that differ, one side wins half by chance."""
    count = first_only + second_only
    if count == 0:
        return 1.0
    tail = sum(math.comb(count, i) for i in range(min(first_only, second_only) + 1))
    return min(1.0, 2 * tail / 2**count)


def compare(
    first: Sequence[Sequence[bool]], second: Sequence[Sequence[bool]], *, seed: int = 0, confidence: float = 0.95
) -> dict[str, Any]:
    """Compare two policies on the same problems, whose samples are `first[i]` and `second[i]`.

    Returns:
        {"problems", "first", "second" (their pass@1), "difference" (second - first), "difference_ci" (paired bootstrap
        over problems), "first_only", "second_only" (problems whose first sample only one solves), "mcnemar_p"}.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} problems: pairs of the same problems are needed")
    means = np.array([[np.mean(a), np.mean(b)] for a, b in zip(first, second, strict=True)], np.float64)
    differences = means[:, 1] - means[:, 0]
    rng, size = np.random.default_rng(seed), (100, len(differences))
    replicas = [differences[rng.integers(len(differences), size=size)].mean(axis=1) for _ in range(_RESAMPLES // 100)]
    tail = 100 * (1 - confidence) / 2
    only = [sum(a[0] and not b[0] for a, b in zip(x, y, strict=True)) for x, y in ((first, second), (second, first))]
    return {
        "problems": len(differences),
        "first": float(means[:, 0].mean()),
        "second": float(means[:, 1].mean()),
        "difference": float(differences.mean()),
        "difference_ci": [float(x) for x in np.percentile(np.concatenate(replicas), [tail, 100 - tail])],
        "first_only": only[0],
        "second_only": only[1],
        "mcnemar_p": mcnemar(*only),
    }


def _winner(votes: Sequence[str], right: dict[str, bool]) -> float:
    counts = Counter(vote for vote in votes if vote)
    if not counts:
        return 0.0
    most = max(counts.values())
    tied = [vote for vote, count in counts.items() if count == most]
    return sum(right[vote] for vote in tied) / len(tied)
