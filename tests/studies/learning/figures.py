"""Figures of the study from the files of its runs: curves, gains, and what each section compares."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from axlearn_like.run.metrics import read_rows
from mesh.errors import UserError
from tests.studies.learning.job import SECTIONS
from tests.studies.learning.learning_curve import Curve, fit_curves

# (better, worse, what the difference is of) by section.
CONTRASTS: dict[str, tuple[str, str]] = {
    "correction at staleness 1": ("stale1_tis", "stale1"),
    "correction at staleness 4": ("stale4_tis", "stale4"),
    "correction at staleness 8": ("stale8_tis", "stale8"),
    "correction at staleness 8, twice the rate": ("stale8_fast_tis", "stale8_fast"),
    "correction at staleness 8, twice the rate, by sequence": ("stale8_fast_sequence", "stale8_fast"),
    "correction at staleness 8, eight updates a batch": ("stale8_epochs4_tis", "stale8_epochs4"),
    "staleness 8": ("stale8", "stale0"),
    "staleness 8, corrected": ("stale8_tis", "stale0"),
    "dynamic sampling": ("dapo", "dapo_static"),
    "two mini-batches for one update": ("grpo", "stale0"),
    "four epochs for one": ("epochs4", "grpo"),
    "pages of int8": ("pages_int8", "pages_raw"),
    "pages of ecsq": ("pages_ecsq", "pages_raw"),
    "KL to the start": ("kl", "grpo"),
}
_SPLITS = ("microbatches", "packed")
_LAST = 4  # a quarter of the updates
_LOGGED = ("clip_fraction", "kl_old_new", "importance_mean", "importance_limited_fraction", "zero_variance_fraction",
           "kl_reference", "entropy", "explained_variance")  # fmt: skip


class Outcome(NamedTuple):
    """A run that has ended.

    Attributes:
        rewards: mean of each batch, drawn by the version that it updates (or an older one); of all that was drawn,
            where groups are chosen.
        tokens: sampled before each batch, whether it was used or not.
        metrics: means over the last quarter of the updates.
    """

    rewards: list[float]
    tokens: list[float]
    metrics: dict[str, float]

    @property
    def last(self) -> float:
        """Mean reward of the last quarter."""
        return statistics.fmean(self.rewards[-max(1, len(self.rewards) // _LAST) :])

    @property
    def mean(self) -> float:
        """Mean reward of all batches: how fast it learned, too."""
        return statistics.fmean(self.rewards)


def read_outcome(path: Path, steps: int) -> Outcome | None:
    """Return what came out of a run of so many updates; None if it has not ended."""
    rows = [row for row in read_rows(path / "metrics.jsonl") if row["phase"] == "rl"]
    if not (path / "report.json").exists() or len(rows) != steps:
        return None
    sampled, tokens = 0.0, list[float]()
    for row in rows:
        tokens.append(sampled)
        sampled += row.get("tokens_drawn", row["gen_tokens"])
    late = rows[-max(1, steps // _LAST) :]
    metrics = {name: [row[name] for row in late if row.get(name) is not None] for name in _LOGGED}
    return Outcome(
        rewards=[row.get("reward_drawn", row["reward"]) for row in rows],
        tokens=tokens,
        metrics={name: statistics.fmean(values) for name, values in metrics.items() if values},
    )


def summarise(found: Mapping[str, Mapping[int, Outcome]]) -> dict[str, Any]:
    """Return the keys of the result that come from runs, by name and seed."""
    return {
        "runs": {name: _figures(list(outcomes.values())) for name, outcomes in found.items()},
        "contrasts": {
            what: contrast(found[better], found[worse])
            for what, (better, worse) in CONTRASTS.items()
            if set(found.get(better, ())) & set(found.get(worse, ()))
        },
        "split": {
            name: split(found[name], found["stale0"])
            for name in _SPLITS
            if set(found.get(name, ())) & set(found.get("stale0", ()))
        },
        "fits": {name: _fit(list(found[name].values())) for name in SECTIONS["objectives"] if name in found},
        "curves": {
            name: {str(seed): [round(reward, 4) for reward in outcome.rewards] for seed, outcome in outcomes.items()}
            for name, outcomes in found.items()
        },
    }


def contrast(better: Mapping[int, Outcome], worse: Mapping[int, Outcome]) -> dict[str, Any]:
    """Return the differences between two runs, seed by seed: mean, and the standard error of the mean.

    `shown`: the mean difference of the last rewards is more than two standard errors from zero; None with one seed.
    """
    seeds = sorted(set(better) & set(worse))
    last = [better[seed].last - worse[seed].last for seed in seeds]
    means = [better[seed].mean - worse[seed].mean for seed in seeds]
    error = _error(last)
    shown = None if error is None else abs(statistics.fmean(last)) > 2 * error
    return {
        "reward_last": round(statistics.fmean(last), 4),
        "reward_last_se": error,
        "reward_mean": round(statistics.fmean(means), 4),
        "reward_mean_se": _error(means),
        "shown": shown,
        "seeds": len(seeds),
    }


def split(parts: Mapping[int, Outcome], whole: Mapping[int, Outcome]) -> dict[str, Any]:
    """Return how far a run whose batches are cut otherwise is from the one whose batches are whole.

    Gradients differ by rounding, until a token is drawn otherwise: from there on the runs are two samples of one law.
    """
    seeds = sorted(set(parts) & set(whole))
    pairs = [list(zip(parts[seed].rewards, whole[seed].rewards, strict=True)) for seed in seeds]
    same = [next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
    return {
        "equal_updates": min(same),
        "reward_last_difference": round(max(abs(parts[seed].last - whole[seed].last) for seed in seeds), 4),
        "seeds": len(seeds),
    }


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the means over seeds of one run, and spreads: the standard deviation over seeds."""
    last, means = [outcome.last for outcome in outcomes], [outcome.mean for outcome in outcomes]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.metrics)
    logged = {name: [o.metrics[name] for o in outcomes if name in o.metrics] for name in names}
    return {
        "reward_first": round(statistics.fmean(outcome.rewards[0] for outcome in outcomes), 4),
        "reward_last": round(statistics.fmean(last), 4),
        "reward_last_spread": _spread(last),
        "reward_mean": round(statistics.fmean(means), 4),
        "reward_mean_spread": _spread(means),
        "sampled_tokens": round(statistics.fmean(outcome.tokens[-1] for outcome in outcomes)),
        "seeds": len(outcomes),
        "late": {name: float(f"{statistics.fmean(values):.3g}") for name, values in logged.items()},
    }


def _fit(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the sigmoid of the curves over updates, or why there is none."""
    try:
        return fit_curves([Curve(list(range(len(o.rewards))), o.rewards) for o in outcomes]).figures()
    except UserError as error:
        return {"refused": str(error)}


def _spread(values: Sequence[float]) -> float | None:
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def _error(values: Sequence[float]) -> float | None:
    return round(statistics.stdev(values) / len(values) ** 0.5, 4) if len(values) > 1 else None
