"""Groups: who belongs to them, what they change, and mistakes in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.parameter_names import MatrixAxes, kind_of
from axlearn_like.learner import SGD, Adafactor, AdamW, Learner, LearnerError, Lion, ParameterGroup
from axlearn_like.learner.param_labels import Matrices
from tests.axlearn_like.learner.parameters import arrays, close, learner, train

GROUPS = (
    ParameterGroup.Config(match="embedding/*", frozen=True),
    ParameterGroup.Config(kinds=("scale",), lr_scale=0.5, optimizer=SGD.Config(momentum=0.0)),
    ParameterGroup.Config(match="*attention*", weight_decay=0.2),
)


@pytest.mark.slow
@pytest.mark.numerics
def test_each_group_is_updated_by_its_own_rules():
    params, state, metrics = train(learner(Lion.Config(weight_decay=0.5), groups=GROUPS))
    start = arrays(0)
    np.testing.assert_array_equal(params["embedding"]["weight_vd"], start["embedding"]["weight_vd"])

    def norm(seed: int) -> float:
        return float(np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(arrays(seed)["layers"]))))

    # Frozen parameters do not count in the norm.
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], [norm(seed) for seed in (1, 2, 3)], rtol=1e-5)
    moved = sum(arrays(seed)["layers"]["norm"]["scale"] for seed in (1, 2, 3))
    close(params["layers"]["norm"]["scale"], start["layers"]["norm"]["scale"] - 0.1 * 0.5 * moved)
    for match, decay in (("attention", 0.2), ("moe", 0.5)):
        alone, _, _ = train(learner(Lion.Config(weight_decay=decay)))
        close(params["layers"][match], alone["layers"][match])
    moments = [leaf.shape for leaf in jax.tree.leaves(state["optax"]) if leaf.ndim]
    assert sorted(moments) == sorted([(4, 16, 2, 2, 4), (4, 2, 2, 4, 16), (3, 2, 16, 12)])


@pytest.mark.slow
def test_groups_without_rules_change_nothing():
    expected, _, _ = train(learner(AdamW.Config(weight_decay=0.1)))
    found, _, _ = train(learner(AdamW.Config(weight_decay=0.1), groups=(ParameterGroup.Config(match="*norm*"),)))
    close(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            (ParameterGroup.Config(match="embeding/weight_vd"),),
            "Learner.groups.0.match.*did you mean 'embedding/weight_vd'",
        ),
        (
            (ParameterGroup.Config(match="*norm*"), ParameterGroup.Config(match="*scale")),
            "groups.1.match: all that .* is in earlier groups",
        ),
        ((ParameterGroup.Config(match="*norm*", kinds=("matrix",)),), "groups.0: .* nothing is of kind matrix"),
    ],
)
def test_a_group_without_parameters_is_refused(groups: tuple[ParameterGroup.Config, ...], message: str):
    built: Learner = learner(AdamW.Config(), groups=groups).build()
    with pytest.raises(LearnerError, match=message):
        built.init(jax.tree.map(jnp.asarray, arrays(0)))


def test_groups_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match=r"groups.0.lr_scale: expected 1.0 in a frozen group, got 0.1"):
        learner(AdamW.Config(), groups=(ParameterGroup.Config(frozen=True, lr_scale=0.1),)).build()
    with pytest.raises(ConfigError, match=r"groups.0.lr_scale: expected 0 or more"):
        learner(AdamW.Config(), groups=(ParameterGroup.Config(lr_scale=-0.1),)).build()


def test_kinds_and_matrices_are_told_by_names():
    kinds = {
        ("embedding/weight_vd", 2): "embedding",
        ("head/weight_dv", 2): "head",
        ("layers/attention/q_dkqh", 5): "matrix",
        ("layers/attention/q_bias_kqh", 4): "bias",
        ("layers/attention/sinks_kq", 3): "bias",
        ("layers/norm/scale", 2): "scale",
        ("layers/moe/router/weight_de", 3): "matrix",
        ("w", 2): "other",
        ("out_proj", 2): "other",  # four letters for two axes: no suffix
    }
    assert {key: kind_of(*key) for key in kinds} == kinds
    axes = Matrices.Config().build().axes
    assert axes("out_kqhd", 5) == MatrixAxes((0,), (1, 2, 3), (4,))
    assert axes("up_edf", 4) == MatrixAxes((0, 1), (2,), (3,))
    assert axes("weight_de", 3) == MatrixAxes((0,), (1,), (2,))  # of a router: experts are its outputs
    assert axes("weight_vd", 2) == MatrixAxes((), (0,), (1,))
    assert axes("scale", 2) is None
    assert Matrices.Config(splits={"khr": "kh,r"}).build().axes("down_khr", 4) == MatrixAxes((0,), (1, 2), (3,))


@pytest.mark.slow
def test_a_group_may_have_an_optimizer_without_matrices():
    cfg = learner(
        AdamW.Config(), groups=(ParameterGroup.Config(kinds=("embedding",), optimizer=Adafactor.Config(min_size=4)),)
    )
    params, _, _ = train(cfg)
    expected, _, _ = train(learner(Adafactor.Config(min_size=4)))
    close(params["embedding"], expected["embedding"])
