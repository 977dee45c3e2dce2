"""The sigmoid's fit: it finds what made a curve, says how sure it is, and refuses curves that have no asymptote."""

import numpy as np
import pytest

from mesh.errors import UserError
from tests.studies.learning.learning_curve import Curve, Sigmoid, fit_curves

TRUE = Sigmoid(start=0.3, asymptote=0.7, exponent=1.6, midpoint=20.0)


def curves(law: Sigmoid = TRUE, *, points: int = 80, noise: float = 0.02, seeds: int = 3) -> list[Curve]:
    rng, compute = np.random.default_rng(0), np.arange(points, dtype=float)
    return [Curve(compute.tolist(), (law(compute) + rng.normal(0, noise, points)).tolist()) for _ in range(seeds)]


def test_it_is_the_formula_of_the_paper():
    assert TRUE(np.asarray([0.0, 20.0, 40.0])) == pytest.approx([0.3, 0.5, 0.3 + 0.4 / (1 + 0.5**1.6)])


def test_it_finds_what_made_the_curves_and_the_interval_has_it():
    fit = fit_curves(curves(), draws=60)
    for name in Sigmoid._fields:
        low, high = fit.interval(name)
        assert low <= getattr(TRUE, name) <= high, name
        assert low < high
    assert fit.best.asymptote == pytest.approx(0.7, abs=0.03) and fit.rmse == pytest.approx(0.02, rel=0.15)
    value, low, high = fit.reached(160)
    assert low < float(TRUE(np.asarray([160.0]))[0]) < high and low < value < high
    figures = fit.figures()
    assert figures["curves"] == 3 and figures["asymptote_ci"][0] <= figures["asymptote"] <= figures["asymptote_ci"][1]


def test_more_seeds_and_less_noise_make_it_surer():
    def width(**changes: float) -> float:
        low, high = fit_curves(curves(**changes), draws=40).interval("asymptote")  # pyright: ignore[reportArgumentType]
        return high - low

    assert width(noise=0.005) < 0.5 * width(noise=0.02)


def test_seeds_that_differ_widen_the_interval():
    """Runs that end at 0.6, 0.7 and 0.8 say less about a recipe than three that end at 0.7."""
    apart = [curves(TRUE._replace(asymptote=a), seeds=1)[0] for a in (0.6, 0.7, 0.8)]
    together, spread = (fit_curves(each, draws=40).interval("asymptote") for each in (curves(), apart))
    assert spread[1] - spread[0] > 2 * (together[1] - together[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no curve; expected a run"),
        (curves(points=10), "a curve of 10 points; expected 16"),
        ([Curve(range(20), [0.1, float("nan")] * 10)], "not finite"),
        ([Curve(range(20), [0.5, 1.5] * 10)], "a reward of 1.5 is above the ceiling of 1"),
        ([Curve(range(20), [0.5] * 20)], r"do not rise: .* a correlation of 0.00, of 20 points"),
        (curves(Sigmoid(0.7, 0.3, 1.6, 20.0)), "do not rise: .* a correlation of -0.9"),
        ([Curve(range(20), [0.5] * 19)], "expected as many of both"),
        ([Curve([0.0] * 20, [0.5] * 20)], "a curve of 1 points"),
    ],
)
def test_what_is_no_curve_is_refused(given: list[Curve], message: str):
    with pytest.raises(UserError, match=message):
        fit_curves(given)


def test_a_straight_rise_has_no_asymptote():
    rng, compute = np.random.default_rng(1), np.arange(60, dtype=float)
    rises = [0.3 + 0.003 * compute + rng.normal(0, 0.03, 60) for _ in range(2)]
    straight = [Curve(compute.tolist(), rise.tolist()) for rise in rises]
    with pytest.raises(
        UserError, match="have not bent: an asymptote of 0.5. fits as well as one of 1.00.*more updates"
    ):
        fit_curves(straight, draws=40)
