"""pass@k, the chance that one of k samples solves a problem, without bias and how sure it is; and majorities."""

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rl.evaluation.statistics import INTERVAL, majority
from rl.protocol.messages import Score


def is_correct(score: Score) -> bool:
    """Return True if the verifier finished and gave full marks. Partial credit does not count."""
    return score.status == "ok" and score.reward >= 1.0 - 1e-6


class ProblemResult(NamedTuple):
    """Independent samples of a problem: their marks, and what each votes for; "": it abstains."""

    problem_id: int
    family: str
    correct: Sequence[bool]
    votes: Sequence[str]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k: 1 - C(samples - correct, k) / C(samples, k).

    It is the share of the k-subsets of the samples that hold a correct one (Chen et al. 2021, arXiv
    2107.03374, eq. 1), computed in integers and rounded once.

    Raises:
        ValueError: k is not in 1..samples, or correct not in 0..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples: 1 <= k <= samples is needed")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples")
    subsets = math.comb(samples, k)
    return (subsets - math.comb(samples - correct, k)) / subsets


def summarise(
    results: Iterable[ProblemResult],
    *,
    ks: Sequence[int] = (1, 8),
    majorities: Sequence[int] = (),
    seed: int = 0,
    resamples: int = 2000,
) -> dict[str, Any]:
    """pass@k of each family and the mean over families, with 95 % bootstrap intervals over problems; and maj@k.

    A family's interval resamples its problems with replacement; the interval of the mean over
    families resamples each family by itself (stratified). The samples of a problem are not
    resampled: their noise already shows in the spread between problems. If all problems of a family
    agree exactly, its interval has no width, which says little when they are few.

    Returns:
        {"pass@1", ..., "pass@1_ci": [low, high], ..., "maj@8", ..., "problems", "samples" (all samples drawn),
        "families": {name: the same without "families"}}.

    Raises:
        ValueError: no results, a problem occurs twice, or one has fewer samples than the largest k.
    """
    families: dict[str, list[ProblemResult]] = {}
    seen: set[int] = set()
    for result in results:
        if result.problem_id in seen:
            raise ValueError(f"problem {result.problem_id} occurs twice: put all of its samples in one result")
        seen.add(result.problem_id)
        families.setdefault(result.family, []).append(result)
    if not families:
        raise ValueError("pass@k of no results")

    rows: dict[str, dict[str, Any]] = {}
    replicas: dict[str, list[np.ndarray]] = {f"pass@{k}": [] for k in ks}
    for name in sorted(families):
        members = families[name]
        row: dict[str, Any] = {"problems": len(members), "samples": sum(len(r.correct) for r in members)}
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])  # another family changes nothing here
        draws = rng.integers(len(members), size=(resamples, len(members)))
        for k in ks:
            values = np.array([pass_at_k(len(r.correct), sum(r.correct), k) for r in members])
            means = values[draws].mean(axis=1)
            row[f"pass@{k}"] = float(values.mean())
            row[f"pass@{k}_ci"] = [float(x) for x in np.percentile(means, INTERVAL)]
            replicas[f"pass@{k}"].append(means)
        for k in majorities:
            row[f"maj@{k}"] = math.fsum(majority(r.votes, r.correct, k) for r in members) / len(members)
        rows[name] = row

    total: dict[str, Any] = {key: sum(row[key] for row in rows.values()) for key in ("problems", "samples")}
    for key, means in replicas.items():
        total[key] = float(np.mean([row[key] for row in rows.values()]))
        total[f"{key}_ci"] = [float(x) for x in np.percentile(np.mean(means, axis=0), INTERVAL)]
    for k in majorities:
        total[f"maj@{k}"] = math.fsum(row[f"maj@{k}"] for row in rows.values()) / len(rows)
    return {**total, "families": rows}


def mean_terms(terms: Iterable[Iterable[tuple[str, float]]]) -> dict[str, float]:
    """Return the mean of each named term over the answers whose rewards have it."""
    found: dict[str, list[float]] = {}
    for name, value in itertools.chain.from_iterable(terms):
        found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}
