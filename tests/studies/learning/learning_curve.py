"""The sigmoid of ScaleRL fitted to curves of RL runs, with intervals by bootstrap; refused where it says nothing.

    R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B)                                   (arXiv 2510.13786, eq. 1)

C is the compute behind the policy that drew a batch: updates, or tokens. A is the asymptote, C_mid where half of the
gain is made, B how steeply. R_0 is fitted too, since a run's first batches are few.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh.errors import UserError

MIN_POINTS = 16  # points of a curve
_INTERVAL = (2.5, 97.5)  # percentiles
_STEEPEST, _FLATTEST = 8.0, 0.5  # B; flatter ones come near no asymptote that data could show
_BEYOND = 30.0  # C_mid is at most so many times the last C


class Curve(NamedTuple):
    """A run's rewards [n] by compute [n] >= 0."""

    compute: Sequence[float]
    rewards: Sequence[float]


class Sigmoid(NamedTuple):
    """Parameters of R(C), as above."""

    start: float
    asymptote: float
    exponent: float
    midpoint: float

    def __call__(self, compute: np.ndarray) -> np.ndarray:
        """Return R(C), float64."""
        return _curve(np.asarray(self), np.asarray(compute, np.float64))


class Fit(NamedTuple):
    """A fitted curve.

    Attributes:
        best: best fit of the curves as they are.
        drawn: fits of each bootstrap sample.
        rmse: root mean squared error of the points around `best`.
        ahead_rmse: root mean squared error of the points in the second half of the compute around a fit to the first
            half alone; None: that half cannot be fitted.
        curves: number of runs.
        last: the largest C.
    """

    best: Sigmoid
    drawn: list[Sigmoid]
    rmse: float
    ahead_rmse: float | None
    curves: int
    last: float

    def interval(self, field: str) -> list[float]:
        """Return the 95 % interval of a parameter."""
        return [float(x) for x in np.percentile([getattr(one, field) for one in self.drawn], _INTERVAL)]

    def reached(self, compute: float) -> list[float]:
        """Return R at so much compute, and its 95 % interval."""
        at = np.asarray([compute])
        return [float(self.best(at)[0]), *map(float, np.percentile([one(at)[0] for one in self.drawn], _INTERVAL))]

    def figures(self) -> dict[str, Any]:
        """Return what is printed: parameters with intervals, errors, and the reward after twice the compute."""
        shown: dict[str, Any] = {}
        for name in Sigmoid._fields:
            shown[name] = float(f"{getattr(self.best, name):.4g}")
            shown[f"{name}_ci"] = [float(f"{x:.4g}") for x in self.interval(name)]
        ahead = None if self.ahead_rmse is None else round(self.ahead_rmse, 4)
        twice = [round(x, 4) for x in self.reached(2 * self.last)]
        sizes = {"curves": self.curves, "bootstrap": len(self.drawn)}
        return {**shown, "rmse": round(self.rmse, 4), "ahead_rmse": ahead, "twice_the_compute": twice, **sizes}


def fit_curves(curves: Sequence[Curve], *, ceiling: float = 1.0, draws: int = 200, seed: int = 0) -> Fit:
    """Fit one sigmoid to runs of one recipe (seeds).

    A bootstrap sample draws runs with replacement, and then blocks of neighbouring residuals of each: both what differs
    between seeds and what is correlated within a run count.

    Args:
        curves: curves of the runs.
        ceiling: the largest reward that there can be.
        draws: bootstrap samples.
        seed: seed of the bootstrap.

    Raises:
        UserError: nothing can be fitted: says why, and what would help.
    """
    parts = [_checked(curve, ceiling) for curve in curves]
    if not parts:
        raise UserError("there is no curve; expected a run or more")
    compute, rewards = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    _check_rise(compute, rewards)
    best = _best(compute, rewards, ceiling)
    rng = np.random.default_rng(seed)
    drawn = [_resampled(parts, best, ceiling, rng) for _ in range(draws)]
    last = max(float(c.max()) for c, _ in parts)
    errors = np.concatenate([r - best(c) for c, r in parts])
    fit = Fit(best, drawn, float(np.sqrt(np.mean(errors**2))), _ahead(parts, ceiling), len(parts), last)
    gained = float(best(np.asarray([last]))[0]) - best.start
    low, high = fit.interval("asymptote")
    if high - low > gained:
        raise UserError(
            f"the curves have not bent: an asymptote of {low:.2f} fits as well as one of {high:.2f}, which differ by "
            f"more than the {gained:.2f} that is gained so far; expected more updates, or more seeds"
        )
    return fit


def _checked(curve: Curve, ceiling: float) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 arrays, refusing what is no curve of rewards."""
    compute, rewards = np.asarray(curve.compute, np.float64), np.asarray(curve.rewards, np.float64)
    if compute.shape != rewards.shape or compute.ndim != 1:
        raise UserError(f"a curve of {compute.shape} compute and {rewards.shape} rewards; expected as many of both")
    if len(compute) < MIN_POINTS or len(np.unique(compute)) < MIN_POINTS:
        raise UserError(f"a curve of {len(np.unique(compute))} points; expected {MIN_POINTS} or more")
    if not (np.isfinite(compute).all() and np.isfinite(rewards).all()) or (compute < 0).any():
        raise UserError("a curve has values that are not finite, or compute below 0")
    if (top := float(rewards.max())) > ceiling:
        raise UserError(f"a reward of {top:g} is above the ceiling of {ceiling:g}; give the largest that there can be")
    return compute, rewards


def _check_rise(compute: np.ndarray, rewards: np.ndarray) -> None:
    """Refuse points whose rewards do not rise with the logarithm of the compute's rank by three standard errors."""
    ranks = np.log1p(np.argsort(np.argsort(compute, kind="stable"), kind="stable"))
    spread = rewards.std() * ranks.std()
    found = 0.0 if spread == 0 else float(np.mean((rewards - rewards.mean()) * (ranks - ranks.mean())) / spread)
    if found * np.sqrt(len(ranks) - 2) <= 3 * np.sqrt(max(1 - found**2, 0.0)):
        raise UserError(
            f"the curves do not rise: rewards and the logarithm of compute have a correlation of {found:.2f}, of "
            f"{len(ranks)} points; a sigmoid has no asymptote then"
        )


def _curve(parameters: np.ndarray, compute: np.ndarray) -> np.ndarray:
    start, asymptote, exponent, midpoint = parameters
    with np.errstate(divide="ignore", over="ignore"):
        return start + (asymptote - start) / (1 + (midpoint / compute) ** exponent)


def _best(compute: np.ndarray, rewards: np.ndarray, ceiling: float, near: Sigmoid | None = None) -> Sigmoid:
    """Return the least squares; of several beginnings, or of the one `near`."""
    from scipy.optimize import least_squares  # most of a second to import

    low, high = float(rewards.min()), float(rewards.max())
    last, least = float(compute.max()), float(np.min(compute[compute > 0]))
    floor = min(low, 0.0)
    bounds = (
        [floor, floor, np.log(_FLATTEST), np.log(least / _BEYOND)],
        [ceiling, ceiling, np.log(_STEEPEST), np.log(last * _BEYOND)],
    )

    def parameters(x: np.ndarray) -> np.ndarray:
        return np.asarray([x[0], x[1], np.exp(x[2]), np.exp(x[3])])

    starts = [(near.exponent, near.midpoint, near.start, near.asymptote)] if near is not None else []
    if near is None:
        starts = [(b, share * last, low, min(high, ceiling)) for b in (0.7, 2.0) for share in (0.1, 0.4, 1.5)]
    found: Any = None
    for exponent, midpoint, start, asymptote in starts:
        begin = np.clip([start, asymptote, np.log(exponent), np.log(midpoint)], *bounds)
        inside = np.clip(begin, np.asarray(bounds[0]) + 1e-9, np.asarray(bounds[1]) - 1e-9)
        one = least_squares(lambda x: _curve(parameters(x), compute) - rewards, inside, bounds=bounds, max_nfev=200)
        found = one if found is None or one.cost < found.cost else found
    return Sigmoid(*map(float, parameters(found.x)))


def _resampled(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], best: Sigmoid, ceiling: float, rng: np.random.Generator
) -> Sigmoid:
    """Return the fit of a bootstrap sample: runs, and blocks of their residuals."""
    compute, rewards = list[np.ndarray](), list[np.ndarray]()
    lowest = min(float(r.min()) for _, r in parts)
    for chosen in rng.integers(len(parts), size=len(parts)):
        c, r = parts[chosen]
        left, size = r - best(c), max(2, round(len(c) ** (1 / 3)))
        begins = rng.integers(len(c) - size + 1, size=-(-len(c) // size))
        blocks = np.concatenate([left[begin : begin + size] for begin in begins])[: len(c)]
        compute.append(c)
        rewards.append(np.clip(best(c) + blocks, lowest, ceiling))
    return _best(np.concatenate(compute), np.concatenate(rewards), ceiling, near=best)


def _ahead(parts: Sequence[tuple[np.ndarray, np.ndarray]], ceiling: float) -> float | None:
    """Return the error of what a fit to the first half of the compute says about the second."""
    halves = [c <= c.max() / 2 for c, _ in parts]
    if any(half.sum() < MIN_POINTS // 2 for half in halves):
        return None
    early = [(c[half], r[half]) for (c, r), half in zip(parts, halves, strict=True)]
    fitted = _best(np.concatenate([c for c, _ in early]), np.concatenate([r for _, r in early]), ceiling)
    errors = [r[~half] - fitted(c[~half]) for (c, r), half in zip(parts, halves, strict=True)]
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))
