"""Norms by group of layers: every parameter of every model is in one, and their squares add up to the global norm's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.learner import Constant, Learner, ParameterGroup
from axlearn_like.learner.grad_norms import grad_norms, layer_group
from experiments.registry import get

DENSE = {"attention", "embedding", "feed_forward", "norms"}


@pytest.mark.parametrize(
    ("name", "field", "expected"),
    [
        ("demo", "policy", DENSE),
        ("llama2_7b", "model", DENSE | {"head"}),
        ("qwen3_30b_a3b", "model", (DENSE - {"feed_forward"}) | {"experts", "router", "head"}),
    ],
)
def test_each_parameter_of_a_model_is_in_a_group(name: str, field: str, expected: set[str]):
    params = split(build_abstract(getattr(get(name), field)))[1]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    groups = {path_name(path): layer_group(path_name(path), x.ndim) for path, x in leaves}
    assert set(groups.values()) == expected
    assert {path for path, group in groups.items() if group == "norms"} == {p for p in groups if p.endswith("scale")}


def test_groups_follow_the_path_and_then_the_axes():
    assert layer_group("layers/attention/k_norm/scale", 2) == "norms"
    assert layer_group("layers/attention/lora/q/a_dl", 3) == "attention"
    assert layer_group("layers/feed_forward/shared/up_df", 3) == "feed_forward"
    assert layer_group("table_vd", 2) == "embedding" and layer_group("words_dv", 2) == "head"
    assert layer_group("temperature", 0) == "others"


def gradients() -> dict[str, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    shapes = {"attention": {"q_dk": (3, 4), "bias": (4,)}, "norm": {"scale": (3,)}, "embedding": {"weight_vd": (5, 3)}}
    make = {m: {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in own.items()} for m, own in shapes.items()}
    return {**make, "head": {"weight_dv": jnp.full((3, 5), 100.0, jnp.bfloat16)}}


@pytest.mark.numerics
def test_norms_of_groups_add_up_to_the_global_norm():
    grads = gradients()
    found = {name: float(norm) for name, norm in jax.jit(grad_norms)(grads).items()}
    whole, squares = found.pop("grad_norm"), dict[str, float]()
    for module, group in {"attention": "attention", "norm": "norms", "embedding": "embedding", "head": "head"}.items():
        own = [np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(grads[module])]
        squares[f"grad_norm/{group}"] = float(sum(own))
    assert {name: norm**2 for name, norm in found.items()} == pytest.approx(squares, rel=1e-5)
    assert whole**2 == pytest.approx(sum(squares.values()), rel=1e-5)


@pytest.mark.slow
def test_the_learner_gives_them_without_frozen_groups_and_names_the_one_that_is_not_finite():
    params = gradients()
    groups = (ParameterGroup.Config(match="embedding/*", frozen=True),)
    learner = Learner.Config(schedule=Constant.Config(lr=0.1), groups=groups).build()
    state = learner.init(params)
    metrics = learner.update(params, state, params)[2]
    assert {name for name in metrics if "/" in name} == {f"grad_norm/{x}" for x in ("attention", "head", "norms")}
    broken = {**params, "head": {"weight_dv": params["head"]["weight_dv"].at[0, 0].set(jnp.nan)}}
    metrics = learner.update(broken, state, params)[2]
    assert [name for name, value in metrics.items() if not np.isfinite(value)] == ["grad_norm", "grad_norm/head"]
