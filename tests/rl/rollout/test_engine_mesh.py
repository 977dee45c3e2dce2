"""Tensor and expert parallelism: an engine on two devices draws what one on a single device draws."""

from typing import Any

import numpy as np
import pytest

from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tests.elsewhere import elsewhere
from tests.rl.rollout.small import POLICY, STOP
from tests.rl.rollout.test_adapters import LIMITS, NAMES, adapter
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

pytestmark = pytest.mark.numerics

MOE = MoE.Config(num_experts=8, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=8))
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def rollouts_on(mesh: dict[str, int], moe: bool = False, **changes: Any) -> list[list[Any]]:
    """Return rollouts of prompts of all lengths, with so few pages that some are preempted."""
    policy = tiny_policy(num_layers=2)
    if moe:
        policy.block = policy.block.clone(feed_forward=MOE)
    cfg = RolloutEngine.Config(
        model=policy, stop_tokens=tuple(range(0, 272, 4)), max_prompt_tokens=24, max_new_tokens=12, mesh=mesh
    )
    engine = cfg.set(max_num_seqs=8, page_size=8, pages=16, steps_per_dispatch=4, **changes).build()
    engine.set_weights(tiny_params(policy), 0)
    found = engine.generate([Request(make_prompt(i, 1 + 3 * i), samples=2, seed=5) for i in range(8)])
    assert engine.stats()["preemptions"] > 0
    return [[r.tokens.tolist(), r.logprobs.tolist(), r.finish_reason] for r in found]


@pytest.mark.slow
def test_on_two_devices_it_draws_the_same_tokens():
    """Sums over heads and over the hidden width are cut in two: log-probabilities equal within 2e-5."""
    found = elsewhere(rollouts_on, {"tensor": 2}, environ=TWO_DEVICES)
    for (tokens, logprobs, reason), expected in zip(found, rollouts_on({}), strict=True):
        assert [tokens, reason] == [expected[0], expected[2]]
        np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=2e-5)


def int8_on_two_devices() -> list[list[Any]]:
    return rollouts_on({"tensor": 2}, kv_cache_dtype="int8")


@pytest.mark.full
def test_int8_keys_and_values_on_two_devices_draw_the_same_tokens():
    """A last bit may decide between two numbers, which moves a log-probability by more than rounding elsewhere."""
    found = elsewhere(int8_on_two_devices, environ=TWO_DEVICES)
    for (tokens, logprobs, reason), expected in zip(found, rollouts_on({}, kv_cache_dtype="int8"), strict=True):
        assert [tokens, reason] == [expected[0], expected[2]]
        np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=2e-3)


@pytest.mark.full  # test_moe_mesh.py has experts on devices in every run
def test_experts_on_two_devices_draw_the_same_bits():
    """Each device computes its experts' outputs as one device does, and all that is added to them are zeros."""
    assert elsewhere(rollouts_on, {"expert": 2}, True, environ=TWO_DEVICES) == rollouts_on({}, moe=True)


def refusal(mesh: dict[str, int]) -> str:
    cfg = RolloutEngine.Config(model=tiny_policy(), stop_tokens=(1,), max_prompt_tokens=4, max_new_tokens=4, mesh=mesh)
    with pytest.raises(UserError) as caught:
        cfg.build()
    return str(caught.value)


def adapted_on(mesh: dict[str, int]) -> list[list[Any]]:
    """Return rollouts of three adapters and the base in one batch."""
    cfg = RolloutEngine.Config(
        model=POLICY, stop_tokens=STOP, max_prompt_tokens=24, max_new_tokens=12, mesh=mesh, max_num_seqs=4
    )
    engine = cfg.build(adapters=LIMITS)
    engine.set_weights(tiny_params(POLICY), 0)
    for name in NAMES:
        engine.load_adapter(name, adapter(name))
    found = engine.generate([Request(make_prompt(3, 20), adapter=name, seed=5) for name in (None, *NAMES)])
    return [[r.tokens.tolist(), r.logprobs.tolist()] for r in found]


@pytest.mark.full
def test_adapters_on_two_devices_draw_the_same_tokens():
    found, expected = elsewhere(adapted_on, {"tensor": 2}, environ=TWO_DEVICES), adapted_on({})
    for (tokens, logprobs), (tokens_of_one, logprobs_of_one) in zip(found, expected, strict=True):
        assert tokens == tokens_of_one
        np.testing.assert_allclose(logprobs, logprobs_of_one, rtol=0, atol=1e-5)


def test_other_axes_are_refused():
    found = elsewhere(refusal, {"data": 2}, environ=TWO_DEVICES)
    assert found.startswith("RolloutEngine.mesh: expected tensor and expert alone")
    assert "needs 2 devices" in refusal({"tensor": 2})  # of which this process has one
