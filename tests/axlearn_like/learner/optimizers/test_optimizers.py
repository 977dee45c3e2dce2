"""Each optimizer against optax or numpy in float64, over several updates; stacks against separate layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axlearn_like.config import ConfigError, config_for
from axlearn_like.learner import SGD, Adafactor, Learner, LearnerError, Lion, Matrices, Muon, Optax
from axlearn_like.learner.optimizers.muon import orthogonalize
from tests.axlearn_like.learner.parameters import arrays, close, learner, train


def by_hand(direction: Any, updates: int = 3, lr: float = 0.1) -> Any:
    """float64 parameters after updates with the gradients of `train`; `direction(path, grads so far, p)`."""
    params = jax.tree.map(np.float64, arrays(0))
    for count in range(1, updates + 1):
        grads = [jax.tree.map(np.float64, arrays(seed)) for seed in range(1, count + 1)]
        params = jax.tree_util.tree_map_with_path(
            lambda path, p, *g: p - lr * direction(path[-1].key, g, p), params, *grads
        )
    return params


def decays(name: str) -> float:
    return 0.0 if name == "scale" else 1.0


@pytest.mark.slow
def test_lion_is_the_sign_of_a_momentum():
    def direction(name: str, grads: Any, p: Any) -> Any:
        m = np.zeros_like(p)
        for g in grads[:-1]:
            m = 0.9 * m + 0.1 * g
        return np.sign(0.8 * m + 0.2 * grads[-1]) + 0.3 * decays(name) * p

    close(train(learner(Lion.Config(b1=0.8, b2=0.9, weight_decay=0.3)))[0], by_hand(direction))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.7, False), (0.7, True)])
def test_sgd_follows_the_trace(momentum: float, nesterov: bool):
    def direction(name: str, grads: Any, p: Any) -> Any:
        m = np.zeros_like(p)
        for g in grads:
            m = momentum * m + g
        return (momentum * m + grads[-1] if nesterov else m) + 0.3 * decays(name) * p

    cfg = SGD.Config(momentum=momentum, nesterov=nesterov, weight_decay=0.3)
    close(train(learner(cfg))[0], by_hand(direction))


def run(transformation: Any, params: Any, grads: list[Any]) -> list[Any]:
    """The directions for these gradients, the parameters standing still."""
    state, update, made = transformation.init(params), jax.jit(transformation.update), []
    for g in grads:
        direction, state = update(g, state, params)
        made.append(direction)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [{}, {"nesterov": False, "update_rms": None, "beta": 0.9}])
def test_muon_equals_optax_for_each_layer_as_a_matrix(cfg: dict[str, Any]):
    muon = Muon.Config(**cfg).build().transformation()
    params = jax.tree.map(jnp.asarray, arrays(0))
    ours = run(muon, params, [arrays(seed) for seed in (1, 2)])[-1]["layers"]
    reference = optax.contrib.muon(
        -1.0, beta=cfg.get("beta", 0.95), nesterov=cfg.get("nesterov", True), consistent_rms=cfg.get("update_rms", 0.2)
    )
    matrices = {"q_dkqh": (16, 16), "out_kqhd": (16, 16)}

    def separate(layers: Any) -> dict[str, Any]:
        attention, experts = layers["attention"], layers["moe"]["up_edf"]
        made = {f"{name}{i}": attention[name][i].reshape(shape) for name, shape in matrices.items() for i in (0, 3)}
        return {**made, "expert0": experts[2, 0], "expert1": experts[2, 1]}

    grads = [separate(arrays(seed)["layers"]) for seed in (1, 2)]
    close(separate(ours), run(reference, grads[0], grads)[-1], atol=1e-5)


@pytest.mark.slow
def test_muon_makes_heads_into_matrices_if_told_so():
    muon = Muon.Config(matrices=Matrices.Config(stack="ekq"), nesterov=False, update_rms=1.0, steps=12).build()
    params = jax.tree.map(jnp.asarray, arrays(0))
    made = run(muon.transformation(), params, [arrays(1)])[0]["layers"]["attention"]
    # Coefficients that are steep at 0 leave singular values between 0.65 and 1.25, however often they are applied.
    for head in (made["q_dkqh"][1, :, 1, 0], made["out_kqhd"][1, 1, 0]):
        values = np.linalg.svd(np.asarray(head) / 4.0, compute_uv=False)  # 4 = sqrt(16), the longer side
        assert values.min() > 0.65 and values.max() < 1.25


@pytest.mark.numerics
def test_newton_schulz_tends_to_the_orthogonal_factor():
    x = np.random.default_rng(0).normal(size=(3, 5, 9))
    found = orthogonalize(jnp.asarray(x, jnp.float32), steps=25, coefficients=(1.875, -1.25, 0.375))
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(found, u @ vt, atol=1e-5)


@pytest.mark.slow
def test_muon_leaves_the_rest_to_its_others():
    params, state, _ = train(learner(Muon.Config(others=SGD.Config(momentum=0.5, weight_decay=0.3))))
    expected, _, _ = train(learner(SGD.Config(momentum=0.5, weight_decay=0.3)))
    close(params["embedding"], expected["embedding"])
    close(params["layers"]["norm"], expected["layers"]["norm"])
    shapes = [leaf.shape for leaf in jax.tree.leaves(state["optax"]) if leaf.ndim]
    assert len(shapes) == 5  # one momentum each, of matrices and of others


def adafactor_of_optax(cfg: Adafactor.Config) -> Any:
    return optax.adafactor(
        1.0,
        min_dim_size_to_factor=cfg.min_size,
        decay_rate=cfg.decay_rate,
        multiply_by_parameter_scale=cfg.min_param_rms is not None,
        clipping_threshold=cfg.clip_rms,
        momentum=cfg.momentum,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "min_size"),
    [({}, 4), ({"clip_rms": None, "min_param_rms": None, "momentum": 0.7, "decay_rate": 0.6}, 128)],
)
def test_adafactor_equals_optax_for_each_layer_as_a_matrix(cfg: dict[str, Any], min_size: int):
    settings = Adafactor.Config(min_size=min_size, **cfg)
    params, grads = jax.tree.map(jnp.asarray, arrays(0)), [arrays(seed, 1e-3) for seed in (1, 2, 3)]
    ours = run(settings.build().transformation(), params, grads)[-1]
    reference = adafactor_of_optax(settings)

    def separate(tree: Any) -> dict[str, Any]:
        attention = tree["layers"]["attention"]
        return {
            "q": attention["q_dkqh"][1].reshape(16, 16),
            "out": attention["out_kqhd"][3].reshape(16, 16),
            "expert": tree["layers"]["moe"]["up_edf"][2, 1],
            "scale": tree["layers"]["norm"]["scale"][2],
            "embedding": tree["embedding"]["weight_vd"],
        }

    expected = run(reference, separate(params), [separate(g) for g in grads])[-1]
    close(jax.tree.map(jnp.negative, separate(ours)), expected, rtol=1e-4)


@pytest.mark.slow
def test_factored_moments_are_small():
    state = train(learner(Adafactor.Config(min_size=4)), updates=1)[1]["optax"]
    floats = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
    vectors = (24 + 16) + 4 * (16 + 16) * 2 + 3 * 2 * (16 + 12) + 4 * 16
    assert floats == vectors


@pytest.mark.slow
def test_whatever_optax_has_is_an_optimizer():
    cfg = learner(Optax.Config(direction=config_for(optax.contrib.scale_by_ademamix, alpha=2.0), weight_decay=0.1))
    reference = optax.contrib.ademamix(0.1, alpha=2.0, weight_decay=0.1, mask=None)
    params: Any = {"w": jnp.asarray(arrays(0)["embedding"]["weight_vd"])}
    state = reference.init(params)
    for seed in (1, 2, 3):
        updates, state = reference.update({"w": arrays(seed)["embedding"]["weight_vd"]}, state, params)
        params = optax.apply_updates(params, updates)
    close(train(cfg)[0]["embedding"]["weight_vd"], params["w"])
    with pytest.raises(LearnerError, match=r"Learner.optimizer.direction: expected an optax transformation"):
        learner(Optax.Config(direction=config_for(optax.constant_schedule, value=1.0))).build()


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (Lion.Config(b1=1.0), r"Learner.optimizer.b1: expected 0 or more and below 1, got 1.0"),
        (SGD.Config(momentum=0.0, nesterov=True), "nesterov"),
        (Adafactor.Config(decay_rate=0.0), "decay_rate: expected above 0"),
        (Muon.Config(steps=0), "steps: expected 1 or more"),
        (Muon.Config(matrices=Matrices.Config(splits={"kh": "khr"})), "split in two by a comma"),
    ],
)
def test_settings_that_make_no_sense_are_refused(cfg: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Learner.Config(optimizer=cfg, schedule=learner(cfg).schedule).build()
