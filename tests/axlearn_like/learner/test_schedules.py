"""The schedules at their corners and one update before and after each."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.learner import (
    Constant,
    InverseSqrt,
    JoinSchedules,
    Linear,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    schedules,
)

pytestmark = pytest.mark.numerics


def values(cfg: Any, counts: list[int]) -> list[float]:
    schedule = cfg.build()
    return [float(schedule(jnp.int32(count))) for count in counts]


def test_schedules_pass_through_their_corners():
    cosine = WarmupCosine.Config(peak_lr=1.0, warmup_steps=4, total_steps=12, end_lr=0.2).build()
    linear = WarmupLinear.Config(peak_lr=1.0, warmup_steps=4, total_steps=12, end_lr=0.2).build()
    for count, a, b in [(0, 0, 0), (2, 0.5, 0.5), (4, 1, 1), (8, 0.6, 0.6), (12, 0.2, 0.2)]:
        np.testing.assert_allclose(cosine(jnp.int32(count)), a, atol=1e-6)
        np.testing.assert_allclose(linear(jnp.int32(count)), b, atol=1e-6)
    np.testing.assert_allclose(linear(jnp.int32(6)), 0.8, atol=1e-6)
    np.testing.assert_allclose(cosine(jnp.int32(6)), 0.2 + 0.8 * (1 + np.cos(np.pi / 4)) / 2)
    assert WarmupCosine.Config(peak_lr=1.0, total_steps=3).build()(jnp.int32(0)) == 1.0


@pytest.mark.parametrize(
    ("shape", "middle"),
    [
        (schedules.linear, 0.5),
        (schedules.cosine, 0.5),
        (schedules.one_minus_sqrt, 1 - 0.5**0.5),
        (schedules.exponential, (2**-5 - 2**-10) / (1 - 2**-10)),
    ],
)
def test_warmup_stable_decay(shape: Any, middle: float):
    cfg = WarmupStableDecay.Config(peak_lr=1.0, warmup_steps=4, decay_steps=8, total_steps=20, end_lr=0.1, shape=shape)
    found = values(cfg, [0, 1, 3, 4, 5, 11, 12, 16, 20, 21, 99])
    fall = 0.1 + 0.9 * middle
    np.testing.assert_allclose(found, [0, 0.25, 0.75, 1, 1, 1, 1, fall, 0.1, 0.1, 0.1], atol=1e-6)
    first = 0.1 + 0.9 * float(shape(jnp.float32(1 / 8)))
    assert first < 1 and values(cfg, [13]) == [pytest.approx(first)]


def test_without_warmup_it_starts_at_the_peak():
    assert values(WarmupStableDecay.Config(peak_lr=1.0, decay_steps=2, total_steps=2), [0, 1, 2]) == [1.0, 0.5, 0.0]


def test_inverse_sqrt_turns_at_the_end_of_warmup():
    found = values(InverseSqrt.Config(peak_lr=2.0, warmup_steps=4), [0, 1, 3, 4, 5, 16, 400])
    np.testing.assert_allclose(found, [0, 0.5, 1.5, 2, 2 * (4 / 5) ** 0.5, 1, 0.2], rtol=1e-6)


def test_joined_parts_count_from_their_own_beginning():
    up, down = Linear.Config(start_lr=0.0, end_lr=1.0, steps=4), Linear.Config(start_lr=1.0, steps=2)
    parts = (up, Constant.Config(lr=1.0), down)
    found = values(JoinSchedules.Config(parts=parts, boundaries=(4, 6)), [0, 2, 3, 4, 5, 6, 7, 8, 9])
    np.testing.assert_allclose(found, [0, 0.5, 0.75, 1, 1, 1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (WarmupCosine.Config(peak_lr=1.0, warmup_steps=5, total_steps=5), "warmup_steps: expected 0 to 4, got 5"),
        (Constant.Config(lr=-1.0), r"Constant.lr: expected a finite learning rate, 0 or more, got -1.0"),
        (Constant.Config(lr=float("nan")), "Constant.lr"),
        (Linear.Config(start_lr=1.0, steps=0), "Linear.steps: expected 1 or more"),
        (InverseSqrt.Config(peak_lr=1.0, warmup_steps=0), "warmup_steps: expected 1 or more"),
        (WarmupStableDecay.Config(peak_lr=1.0, warmup_steps=3, decay_steps=3, total_steps=5), "total_steps - decay"),
        (
            JoinSchedules.Config(parts=(Constant.Config(lr=1.0),), boundaries=(3,)),
            "boundaries: expected 0 rising numbers",
        ),
        (
            JoinSchedules.Config(parts=(Constant.Config(lr=1.0),) * 3, boundaries=(3, 3)),
            "boundaries: expected 2 rising numbers",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(cfg: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        cfg.build()
