"""State in bfloat16 and on the host."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.learner import EMA, AdamW, BFloat16State, HostOffload, Learner, LearnerError, Lion
from axlearn_like.learner.state_storage import _round
from axlearn_like.training.step import init_state, make_train_step
from mesh import make_mesh, to_named_sharding
from tests.axlearn_like.learner.parameters import SPECS, arrays, close, learner, train
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics


@pytest.mark.slow
def test_stochastic_rounding_is_right_on_average():
    x = jnp.asarray([1.0, 1.0 + 2**-9, -1.0 - 2**-10, 3e38, 0.0, 1e-40, jnp.inf], jnp.float32)
    rounded = jax.vmap(lambda key: _round(x, key))(jax.random.split(jax.random.key(0), 4096)).astype(jnp.float32)
    found = np.asarray(rounded, np.float64)
    assert set(np.unique(found[:, 1])) == {1.0, 1.0 + 2**-7}
    np.testing.assert_allclose(found[:, :3].mean(0), np.asarray(x, np.float64)[:3], atol=3e-4)
    assert (found[:, 0] == 1.0).all() and (found[:, 4] == 0.0).all() and np.isinf(found[:, 6]).all()


@pytest.mark.slow
def test_a_slow_second_moment_still_rises():
    optimizer = AdamW.Config(b2=0.999)

    def moment(stochastic: bool) -> float:
        storage = (BFloat16State.Config(match="*/nu/*", stochastic=stochastic),)
        built: Learner = learner(optimizer, state_storage=storage).build()
        params = {"w": jnp.zeros((64, 64))}
        state, update = built.init(params), jax.jit(built.update)
        for _ in range(400):
            _, state, _ = update({"w": jnp.ones((64, 64))}, state, params)
        assert state["optax"][0][0].nu["w"].dtype == jnp.bfloat16 and state["optax"][0][0].mu["w"].dtype == jnp.float32
        return float(jnp.mean(state["optax"][0][0].nu["w"].astype(jnp.float32)))

    expected = 1 - 0.999**400
    assert moment(True) == pytest.approx(expected, rel=0.01)
    assert moment(False) < 0.8 * expected  # it stays where one update is less than half a step


@pytest.mark.slow
def test_updates_follow_float32_and_skipped_ones_change_nothing():
    cfg = learner(AdamW.Config(), state_storage=(BFloat16State.Config(),))
    params, state, _ = train(cfg)
    expected, _, _ = train(learner(AdamW.Config()))
    close(params, expected, rtol=0.0, atol=0.02)  # of updates of 0.3 in all
    again, _, _ = train(cfg, updates=1, start=(params, state))
    more, _, _ = train(cfg, updates=4)
    jax.tree.map(np.testing.assert_array_equal, again, more)  # resumed or not: the same bits
    nans = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    _, skipped, _ = jax.jit(cfg.build().update)(nans, state, params)
    jax.tree.map(np.testing.assert_array_equal, skipped["optax"], state["optax"])


def test_a_pattern_that_matches_nothing_is_refused():
    built: Learner = learner(Lion.Config(), state_storage=(BFloat16State.Config(match="*/nu/*"),)).build()
    with pytest.raises(LearnerError, match=r"Learner.state_storage.0.match: '\*/nu/\*' matches no array of the state"):
        built.init(jax.tree.map(jnp.asarray, arrays(0)))


def on_host(directory: str) -> list[Any]:
    """Kinds of memory, differences from a state on the devices, and restored state, on eight devices."""
    cfg = learner(AdamW.Config(), ema=EMA.Config(), state_storage=(HostOffload.Config(),))
    expected, _, _ = train(learner(AdamW.Config()))
    built: Learner = cfg.build()

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.sum(p * g) for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True)), {}

    mesh = make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    with jax.set_mesh(mesh):

        def put(tree: Any) -> Any:
            return jax.tree.map(jax.device_put, tree, SPECS)

        abstract = jax.eval_shape(lambda params: init_state(params, built), put(arrays(0)))
        abstract = to_named_sharding(abstract, mesh)
        abstract["opt_state"] = built.placed(abstract["opt_state"])
        shardings = jax.tree.map(lambda a: a.sharding, abstract)
        state = jax.jit(lambda params: init_state(params, built), out_shardings=shardings)(put(arrays(0)))
        step = make_train_step(loss, built, like=state)
        for seed in (1, 2, 3):
            state, _ = step(state, put(arrays(seed)))
        checkpointer = Checkpointer.Config().build(directory=Path(directory))
        checkpointer.save(3, state, {})
        checkpointer.wait()
        restored, _ = checkpointer.restore(abstract, 3)
        checkpointer.close()
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(restored["opt_state"]) if x.ndim}
    same = jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), restored, state))
    apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), state["params"], expected)
    return [sorted(kinds), same, max(jax.tree.leaves(apart)), step._cache_size()]  # pyright: ignore


def test_state_on_the_host_gives_the_same_updates_and_checkpoints(tmp_path: Any):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    kinds, same, apart, programs = elsewhere(on_host, str(tmp_path), environ=flags)
    assert kinds == ["pinned_host"] and same and within(apart, 5e-6) and programs == 1
