"""A feature enters every experiment by one modifier of at most ten lines, and nothing else changes.

Each modifier is applied to each registered experiment; the models are built and run on described arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from axlearn_like.config import ConfigBase, from_text, replace, to_text, walk_configs
from axlearn_like.kernels.attention.dispatch import FirstSupported
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel
from axlearn_like.kernels.attention.xla import capped, position_mask
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.learner import Learner
from axlearn_like.training.step import init_state
from experiments import modifiers, registry
from tests.studies.modularity import LINES, Traced, code_lines, models, trace


class OneHeadAtATime(Kernel):
    """A kernel that nobody has heard of: a loop over key/value heads."""

    class Config(ConfigBase["OneHeadAtATime"]):
        pass

    explicit = True

    def supported(self, signature: AttentionSignature) -> str | None:
        return "has no sinks" if signature.sinks else None

    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        mask = arrays.same_segment_bts
        visible = position_mask(signature.rules, arrays.places, jnp.arange(arrays.k_bskh.shape[1]))
        mask = mask if visible is None else mask & visible
        mixed = []
        for head in range(signature.kv_heads):
            scores = jnp.einsum("btqh,bsh->bqts", arrays.q_btkqh[:, :, head], arrays.k_bskh[:, :, head])
            scores = capped(scores * signature.rules.scale_of(signature.head_dim), signature.rules)
            weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
            mixed.append(jnp.einsum("bqts,bsh->btqh", weights, arrays.v_bskh[:, :, head]))
        return checkpoint_name(jnp.stack(mixed, axis=2), "one_head_at_a_time")


def another_kernel(cfg: ConfigBase[Any]) -> None:
    """The kernel above in all attention."""
    replace(cfg, FirstSupported.Config, lambda kernels: OneHeadAtATime.Config())


MODIFIERS = (modifiers.no_positions, modifiers.experts, modifiers.low_rank, modifiers.int8, another_kernel)


def modified(name: str, modifier: Callable[[Any], None] | None) -> ConfigBase[Any]:
    cfg = registry.get(name)
    if modifier is not None:
        modifier(cfg)
    return cfg


def traced(cfg: ConfigBase[Any]) -> dict[str, Traced]:
    """Every model of an experiment; equal ones are traced once."""
    return {path: trace(to_text(model)) for path, model in models(cfg).items()}


def moments(cfg: ConfigBase[Any], params: Any) -> set[str]:
    """The parameters for which an experiment's (first) learner keeps state."""
    learner = next(c for _, c in walk_configs(cfg) if isinstance(c, Learner.Config)).build()
    state = jax.eval_shape(lambda p: init_state(p, learner), params)
    names = (jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(state))
    return {name.partition("/mu/")[2] for name in names if "/mu/" in name}


@pytest.mark.parametrize("modifier", MODIFIERS, ids=lambda m: m.__name__)
def test_a_modifier_has_ten_lines_at_most_and_names_no_experiment(modifier: Callable[[Any], None]):
    assert 0 < code_lines(modifier) <= LINES
    assert not set(registry.entries()) & set(modifier.__code__.co_names + modifier.__code__.co_varnames)


# In every run each experiment has every third modifier, and each modifier every third experiment.
PAIRS = [
    pytest.param(modifier, name, id=f"{modifier.__name__}-{name}", marks=[pytest.mark.full] * ((m + n) % 3 > 0))
    for m, modifier in enumerate(MODIFIERS)
    for n, name in enumerate(registry.entries())
]


@pytest.mark.parametrize(("modifier", "name"), PAIRS)
def test_every_modifier_fits_every_experiment(modifier: Callable[[Any], None], name: str):
    plain, cfg = modified(name, None), modified(name, modifier)
    before, after = traced(plain), traced(cfg)
    assert before and before.keys() == after.keys()
    for path, was in before.items():
        now = after[path]
        assert now.logits == was.logits and now.hidden == was.hidden
        CHECKS[modifier.__name__](was, now)
    if modifier is modifiers.low_rank:
        (one, *_) = after.values()
        assert moments(cfg, one.tree) == {path for path in one.params if "/lora/" in path}
    assert from_text(to_text(cfg)) == cfg  # a run directory keeps it so


def check_positions(was: Traced, now: Traced) -> None:
    assert now.params == was.params
    assert "cos" in was.primitives and not {"cos", "sin"} & now.primitives


def check_experts(was: Traced, now: Traced) -> None:
    gates = [shape for path, shape in now.params.items() if path.endswith("feed_forward/experts/gate_edf")]
    assert [shape[1] for shape in gates] == [4]
    if (dense := was.params.get("layers/feed_forward/gate_df")) is not None:
        assert gates[0][2:] == dense[1:]
    assert not any(path.startswith("layers/feed_forward/gate") for path in now.params)
    assert {path for path in was.params if "feed_forward/" not in path} <= now.params.keys()


def check_low_rank(was: Traced, now: Traced) -> None:
    added = {path: shape for path, shape in now.params.items() if "/lora/" in path}
    base = {path.replace("/inner/", "/"): shape for path, shape in now.params.items() if path not in added}
    assert base == was.params
    assert now.params["layers/attention/lora/q_a_dl"] == (*was.params["layers/attention/q_dkqh"][:2], 4)
    adapted = [path for path in was.params if path.startswith("layers/") and not path.endswith(("scale", "weight_de"))]
    assert len(added) == 2 * len([path for path in adapted if "bias" not in path])


def check_int8(was: Traced, now: Traced) -> None:
    assert {path.replace("/inner/", "/"): shape for path, shape in now.params.items()} == was.params
    assert "int8" in now.dtypes and "int8" not in was.dtypes


def check_kernel(was: Traced, now: Traced) -> None:
    assert now.params == was.params
    assert "one_head_at_a_time" in now.names and "one_head_at_a_time" not in was.names


CHECKS: dict[str, Callable[[Traced, Traced], None]] = {
    "no_positions": check_positions,
    "experts": check_experts,
    "low_rank": check_low_rank,
    "int8": check_int8,
    "another_kernel": check_kernel,
}


@pytest.mark.numerics
def test_the_new_kernel_computes_attention():
    """The new kernel is no stand-in: outputs are those of the kernel in its place."""
    import numpy as np
    from flax import nnx

    from axlearn_like.layers.base import bind, split
    from axlearn_like.layers.contexts.packed import PackedContext
    from tests.axlearn_like.layers.small import initialise

    cfg = Attention.Config(dim=16, num_heads=4, num_kv_heads=2)
    graphdef, params = initialise(cfg)
    other, _ = split(jax.eval_shape(lambda: cfg.clone(kernel=OneHeadAtATime.Config()).build(rngs=nnx.Rngs(0))))
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    context = PackedContext(jnp.tile(jnp.arange(6), (2, 1)), jnp.array([[1, 1, 1, 2, 2, 0]] * 2))
    results = jax.jit(lambda p: [bind(g, p)(x, context, None)[0] for g in (graphdef, other)])(params)
    np.testing.assert_allclose(*results, atol=1e-5)
    assert jnp.abs(results[0]).max() > 0.01
