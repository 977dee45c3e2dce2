"""Quantised layers: in training, in products, and as an engine holds them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config import ConfigError
from axlearn_like.kernels.quantised_matmul import dequantise, quantise, round_to
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.embedding import Head, PositionedEmbedding, ScaledEmbedding
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.base import plain_config, plain_params
from axlearn_like.layers.wrappers.quantised import (
    QuantisedProducts,
    QuantisedWeights,
    StoredVocabulary,
    StoredWeights,
    stored_config,
    stored_params,
)
from mesh.errors import UserError
from tests.axlearn_like.layers.small import initialise, small_decoder

PLAIN = SwiGLU.Config(dim=8, hidden=12)
X = jax.random.normal(jax.random.key(0), (2, 3, 8))


@pytest.mark.slow
def test_a_wrapped_layer_is_the_layer_with_rounded_weights():
    graphdef, params = initialise(QuantisedWeights.Config(inner=PLAIN, skip="up_*"))
    plain, _ = initialise(PLAIN)
    rounded = {
        name: dequantise(quantise(params["inner"][name], [0], "int8"), jnp.float32) for name in ("gate_df", "down_fd")
    }
    found = bind(graphdef, params)(X)[0]
    np.testing.assert_array_equal(found, bind(plain, {**params["inner"], **rounded})(X)[0])
    exported = plain_params(graphdef, params)
    assert (exported["gate_df"] == rounded["gate_df"]).all() and (exported["up_df"] == params["inner"]["up_df"]).all()


@pytest.mark.parametrize("activations", [None, "int8"])
def test_held_weights_compute_what_was_trained(activations):
    """Weight-only: as with rounded weights. With activations: as products of rounded numbers. Both to the bit."""
    wrapper = QuantisedWeights if activations is None else QuantisedProducts
    trained, params = initialise(wrapper.Config(inner=PLAIN))
    how = StoredWeights.Config(inner=PLAIN, activations=activations)
    held, _ = split(how.build(rngs=nnx.Rngs(0)))
    own = bind(held, split(how.build(rngs=nnx.Rngs(0)))[1]).stored(params["inner"])
    assert own["gate_df"].qvalue.dtype == jnp.int8
    found = jax.jit(lambda own: bind(held, {"inner": own})(X)[0])(own)
    np.testing.assert_array_equal(found, jax.jit(lambda params: bind(trained, params)(X)[0])(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg",
    [
        ScaledEmbedding.Config(dim=8, vocab_size=10, init_std=1.0, logit_soft_cap=3.0),
        PositionedEmbedding.Config(dim=8, vocab_size=10, max_length=6),
        Head.Config(dim=8, vocab_size=10),
    ],
)
def test_a_held_vocabulary_looks_up_and_scores_as_its_rounded_table(cfg):
    plain, params = initialise(cfg)
    held, own = split(StoredVocabulary.Config(inner=cfg).build(rngs=nnx.Rngs(0)))
    name, axis = ("weight_dv", 0) if isinstance(cfg, Head.Config) else ("weight_vd", 1)
    assert own["inner"][name].qvalue.dtype == jnp.int8 and own["inner"][name].scale.size == 10
    layer = bind(held, {"inner": bind(held, own).stored(params)})
    expected = bind(plain, {**params, name: round_to(params[name], [axis], "int8")})
    np.testing.assert_array_equal(layer.logits(X), expected.logits(X))
    if name == "weight_vd":
        tokens = jnp.array([[3, 9, 0], [7, 7, 1]])
        context = RowContext(jnp.broadcast_to(jnp.arange(3), tokens.shape))
        for dtype in (jnp.float32, jnp.bfloat16):
            np.testing.assert_array_equal(layer(tokens, dtype, context), expected(tokens, dtype, context))


@pytest.mark.slow
def test_a_decoder_is_held_in_blocks_and_an_engine_keeps_rounded_products():
    cfg: Any = small_decoder(num_layers=2).set(head=Head.Config())
    how = StoredWeights.Config(numbers="int4", group=4, layers=("feed_forward",), vocabulary="int8")
    held = stored_config(cfg, how)
    _, params = initialise(cfg)
    model = build_abstract(held)
    found = stored_params(model, params)
    assert jax.tree.structure(found) == jax.tree.structure(split(model)[1])
    gate = found["layers"]["feed_forward"]["inner"]["gate_df"]
    assert gate.qvalue.shape == (2, 32, 48) and gate.scale.shape == (2, 8, 48) and gate.qvalue.dtype == jnp.int4
    for table in (found["embedding"]["inner"]["weight_vd"], found["head"]["inner"]["weight_dv"]):
        assert table.qvalue.dtype == jnp.int8
    assert found["layers"]["attention"] is not None and "inner" not in found["layers"]["attention"]

    block = cfg.block.clone()
    block.feed_forward = QuantisedProducts.Config(inner=QuantisedWeights.Config(inner=block.feed_forward))
    both = small_decoder(block=block)
    assert plain_config(both) == small_decoder()
    kept: Any = plain_config(both, engine=True)
    assert isinstance(kept.block.feed_forward, QuantisedProducts.Config)
    assert isinstance(kept.block.feed_forward.inner, SwiGLU.Config)
    graphdef, params = initialise(both)
    abstract = split(build_abstract(kept))[1]
    unwrapped = jax.eval_shape(lambda params: plain_params(graphdef, params, engine=True), params)
    assert jax.tree.structure(unwrapped) == jax.tree.structure(abstract)
    with pytest.raises(UserError, match="QuantisedProducts round the weights themselves"):
        stored_config(kept, StoredWeights.Config())


def test_what_cannot_be_rounded_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"group: expected a divisor of the 8 inputs of gate_df, got 3"):
        QuantisedWeights.Config(inner=PLAIN, group=3).build(rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"no matrix of SwiGLU fits match='gate_fd'.*gate_df"):
        QuantisedWeights.Config(inner=PLAIN, match="gate_fd").build(rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"activations: expected None, or int4 with group=None, got 'int8'"):
        StoredWeights.Config(inner=PLAIN, numbers="int4", activations="int8").check()
    with pytest.raises(ConfigError, match=r"numbers.*int3"):
        QuantisedWeights.Config(inner=PLAIN, numbers="int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"match: expected '\*': the products of a layer are rounded together"):
        QuantisedProducts.Config(inner=PLAIN, match="gate_df").build(rngs=nnx.Rngs(0))
    mixture = MoE.Config(dim=8, num_experts=2, router=SoftmaxRouter.Config(top_k=1), experts=Experts.Config(hidden=4))
    with pytest.raises(UserError, match="products with experts/down_efd are not rounded"):
        build_abstract(QuantisedProducts.Config(inner=mixture))
