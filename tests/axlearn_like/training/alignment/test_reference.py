"""Reference policies: which parameters each has, what is held twice, and what a checkpoint keeps of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from axlearn_like.training.alignment.reference import FrozenCopy, MovingAverage, Reference, WithoutAdapters

FROZEN = ("base/w", "head")


def host(params: Params) -> dict[str, bytes]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def policy(value: float) -> Params:
    """A base that stays, and an adapter and a scale that are trained."""
    lora = {"w_a": jnp.full(3, value), "w_b": jnp.full(2, -value)}
    return {"base": {"w": jnp.ones(4), "lora": lora}, "head": jnp.zeros(2), "scale": jnp.full(1, value)}


def built(cfg: Reference.Config, *values: float) -> tuple[Reference, Params]:
    """The reference after an update to each of these values, and the policy."""
    reference = cfg.build(frozen=FROZEN)
    reference.start(policy(values[0]))
    for step, value in enumerate(values[1:], start=1):
        reference.updated(step, policy(value))
    return reference, policy(values[-1])


def test_a_frozen_copy_is_version_0_and_shares_what_is_frozen():
    reference, now = built(FrozenCopy.Config(), 1.0, 2.0, 3.0)
    params = reference.params(now)
    assert host(params) == host(policy(1.0))
    assert params["base"]["w"] is now["base"]["w"] and params["head"] is now["head"]
    assert sorted(host(reference.saved())) == [
        f"['constant']['reference']{key}" for key in ("['base']['lora']['w_a']", "['base']['lora']['w_b']", "['scale']")
    ]


def test_a_frozen_copy_can_be_taken_again_every_so_many_updates():
    for last, expected in ((1, 0.0), (2, 2.0), (3, 2.0), (4, 4.0)):
        reference, now = built(FrozenCopy.Config(reset_every=2), *(float(v) for v in range(last + 1)))
        assert host(reference.params(now)) == host(policy(expected))


def test_without_adapters_is_the_base_and_holds_nothing_else_twice():
    reference, now = built(WithoutAdapters.Config(), 1.0, 5.0)
    params = reference.params(now)
    jax.tree.map(np.testing.assert_array_equal, params, {**policy(0.0), "scale": jnp.full(1, 5.0)})
    assert params["base"]["w"] is now["base"]["w"] and params["scale"] is now["scale"] and reference.saved() == {}


@pytest.mark.numerics
def test_a_moving_average_is_that_of_float64():
    values = [1.0, 2.0, -3.0, 0.5]
    reference, now = built(MovingAverage.Config(decay=0.9), *values)
    expected = values[0]
    for value in values[1:]:
        expected = 0.9 * expected + 0.1 * value
    params = reference.params(now)
    np.testing.assert_allclose(params["scale"], expected, rtol=1e-6)
    np.testing.assert_allclose(params["base"]["lora"]["w_b"], -expected, rtol=1e-6)
    assert params["base"]["w"] is now["base"]["w"]


@pytest.mark.parametrize("cfg", [FrozenCopy.Config(reset_every=2), MovingAverage.Config(decay=0.9)])
def test_what_is_described_saved_and_restored_is_one(cfg: Reference.Config):
    reference, now = built(cfg, 1.0, 2.0, 4.0)
    described, saved = reference.describe(jax.eval_shape(lambda: policy(0.0))), reference.saved()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), described) == jax.tree.map(lambda x: (x.shape, x.dtype), saved)
    other, state = cfg.build(frozen=FROZEN), {"step": 2, **saved}
    other.restore(state)
    assert state == {"step": 2} and host(other.params(now)) == host(reference.params(now))
