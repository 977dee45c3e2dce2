"""LoRA on a base of int8 numbers: against matrices rounded by numpy, in training, resumed, and imported."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.convert import StartFrom, WrapPlain
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import replace
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from axlearn_like.layers.wrappers.int8_base import scale_name
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.learner import ParameterGroup
from axlearn_like.training.losses import make_supervised_loss
from mesh import UserError
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.axlearn_like.layers.wrappers.test_lora import flat
from tests.axlearn_like.tiny import tiny_trainer
from tests.axlearn_like.training.step_mesh import make_batch

pytestmark = pytest.mark.numerics

RANK = 2
FROZEN = (ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True))
INPUTS = {"q_dkqh": 1, "k_dkh": 1, "v_dkh": 1, "out_kqhd": 3, "gate_df": 1, "up_df": 1, "down_fd": 1}


def with_lora(model: Any, **changes: Any) -> Any:
    def adapt(inner: Any) -> Any:
        return LoRA.Config(inner=inner, rank=RANK, **changes)

    replace(model, Block.Config, lambda b: b.set(attention=adapt(b.attention), feed_forward=adapt(b.feed_forward)))
    return model


def rounded(weight: np.ndarray, inputs: int) -> np.ndarray:
    """Nearest of 255 multiples of a scale for each output; the first axis is the layer."""
    axes = tuple(range(1, 1 + inputs))
    scale = np.abs(weight).max(axes, keepdims=True) / 127
    return np.round(weight / scale) * scale


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"separate": True}, {"magnitudes": True}])
def test_it_computes_with_the_matrices_that_numpy_rounds(options: dict[str, Any]):
    cfg = with_lora(small_decoder(num_layers=2), base="int8", **options)
    like = with_lora(small_decoder(num_layers=2), **options)
    graphdef, held = initialise(cfg)
    like_graphdef, params = initialise(like)
    plain = initialise(plain_config(cfg))[1]
    held = jax.jit(lambda: WrapPlain.Config(seed=1).build().convert(plain, held))()
    params = jax.jit(lambda: WrapPlain.Config(seed=1).build().convert(plain, params))()
    for name, leaf in flat(params).items():
        *_, last = name.split("/")
        if "/inner/" in name and last in INPUTS:
            layer, _, key = name.rpartition("/")
            part: Any = params
            for one in layer.split("/"):
                part = part[one]
            part[key] = jnp.asarray(rounded(leaf, INPUTS[last]))
            assert flat(held)[name].dtype == np.int8
            assert np.abs(rounded(leaf, INPUTS[last]) - leaf).max() > 0, "rounding changes something"
    batch = {name: jnp.asarray(x[:4]) for name, x in make_batch().items()}

    def graded(graphdef: Any, params: Any) -> Any:
        fixed, lora = {}, {}
        for name, leaf in jax.tree_util.tree_leaves_with_path(params):
            (lora if "lora" in jax.tree_util.keystr(name) else fixed)[jax.tree_util.keystr(name)] = leaf
        treedef = jax.tree.structure(params)
        names = [jax.tree_util.keystr(name) for name, _ in jax.tree_util.tree_leaves_with_path(params)]

        def loss(lora: Any) -> Any:
            whole = jax.tree.unflatten(treedef, [{**fixed, **lora}[name] for name in names])
            return make_supervised_loss(graphdef)(whole, batch)

        # Rows of B are zero at first, so that A has no gradient: fill them.
        filled = {name: leaf + 0.05 * ("_b_" in name) for name, leaf in lora.items()}
        (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(filled)
        return value, grads

    value, grads = graded(graphdef, held)
    expected, expected_grads = graded(like_graphdef, params)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, leaf in grads.items():
        np.testing.assert_allclose(leaf, expected_grads[name], rtol=2e-3, atol=2e-5 * float(jnp.abs(leaf).max() + 1))
    for name, leaf in flat(plain_params(graphdef, held)).items():
        np.testing.assert_allclose(leaf, flat(plain_params(like_graphdef, params))[name], atol=1e-5)


@pytest.mark.slow
def test_a_run_starts_from_a_float_checkpoint_trains_factors_alone_and_is_resumed(tmp_path: Path):
    base = tiny_trainer(4).build()
    base.run(tmp_path / "base", progress=False)
    start = StartFrom.Config(path=str(tmp_path / "base"), conversions=(WrapPlain.Config(),))

    def adapted(steps: int) -> Any:
        cfg = tiny_trainer(steps, start_from=start)
        cfg.learner.groups = FROZEN
        return cfg.set(model=with_lora(cfg.model, base="int8")).build()

    whole = adapted(8).run(tmp_path / "whole", progress=False)
    adapted(4).run(tmp_path / "two", progress=False)
    resumed = adapted(8).run(tmp_path / "two", progress=False, force=True)
    assert resumed["loss"] == whole["loss"]
    first, last = (flat(restore_params(f"{tmp_path}/whole@{step}")) for step in (4, 8))
    changed = {name for name in first if (first[name] != last[name]).any()}
    assert changed == {name for name in first if "/lora/" in name}
    numbers = [name for name, leaf in first.items() if leaf.dtype == np.int8]
    assert len(numbers) == 7 and all("/inner/" in name for name in numbers)
    plain = flat(restore_params(tmp_path / "base"))
    for name in numbers:
        layer, _, matrix = name.partition("/inner/")
        scale = first[f"{layer}/base/{scale_name(matrix, first[name].ndim)}"]
        assert np.abs(plain[name.replace("/inner/", "/")]).max() == pytest.approx(127 * scale.max(), rel=1e-5)


def test_a_learner_that_would_train_the_numbers_is_refused(tmp_path: Path):
    cfg = tiny_trainer(4)
    trainer = cfg.set(model=with_lora(cfg.model, base="int8")).build()
    with pytest.raises(UserError, match=r"layers/attention/inner/\w+ has int8 numbers.*ParameterGroup"):
        trainer.run(tmp_path / "run", progress=False)
