"""Configs that presets make; their gradients are held to the formulas of their papers by test_invariance.py."""

import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import PRESETS, NoRegulariser, SoftOverlongPenalty


def test_every_call_makes_a_fresh_config():
    first = PRESETS["grpo"]()
    first.surrogate.set(low=0.9)
    assert PRESETS["grpo"]() != first
    assert isinstance(PRESETS["grpo"]().build().regulariser, type(NoRegulariser.Config().build()))


@pytest.mark.numerics
def test_dapo_takes_its_overlong_penalty_whole_or_not_at_all():
    cfg = PRESETS["dapo"](max_length=4, buffer=2)
    shaped = cfg.build().prepare(np.array([[1.0, 1.0, 0.0]]), np.ones((1, 3, 4), bool))
    plain = PRESETS["dapo"]().build().prepare(np.array([[1.0, 1.0, 0.0]]), np.ones((1, 3, 4), bool))
    np.testing.assert_allclose(shaped.arrays["advantages"], plain.arrays["advantages"], rtol=1e-5)
    assert cfg.reward_shaping is not None and PRESETS["dapo"]().reward_shaping is None
    with pytest.raises(UserError, match="both max_length and buffer"):
        PRESETS["dapo"](max_length=4)


def test_maxrl_with_rewards_that_may_be_negative_is_refused():
    shaping = SoftOverlongPenalty.Config(max_length=4, buffer=2)
    with pytest.raises(UserError, match=r"reward_shaping: expected None: shaped rewards may be negative"):
        PRESETS["maxrl"]().set(reward_shaping=shaping).build()
