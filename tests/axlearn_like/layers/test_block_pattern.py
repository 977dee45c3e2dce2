"""Stacks of blocks that are not alike compute what their layers compute one after another."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config import ConfigBase, ConfigError
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block, Decoder, SandwichBlock
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.moe.routing import PADDING
from axlearn_like.operations.flops import causal_pairs, model_flops, rows_workload
from axlearn_like.training.program import check_length
from mesh import UserError, make_mesh
from tests.axlearn_like.layers.small import initialise

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 8)).astype(np.int32)
SEGMENTS = np.array([[1] * 8, [1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 0]], np.int32)
CONTEXT = PackedContext(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
DENSE = SwiGLU.Config(hidden=24)


def block(window: int | None = None, theta: float = 10_000.0, feed_forward: ConfigBase[Any] = DENSE) -> Block.Config:
    attention = Attention.Config(num_heads=2, num_kv_heads=1, window=window, rope=Rope.Config(theta=theta))
    return Block.Config(attention=attention, feed_forward=feed_forward)


def mixture(record: bool = True) -> MoE.Config:
    router = SoftmaxRouter.Config(top_k=2, load_balance=0.1)
    return MoE.Config(num_experts=4, router=router, experts=Experts.Config(hidden=8), record_routing=record)


LOCAL, GLOBAL = block(window=2), block(theta=500.0)


def decoder(pattern: Any, layers: int, **changes: Any) -> Decoder.Config:
    return Decoder.Config(vocab_size=40, dim=16, num_layers=layers, block=pattern, **changes)


def two_to_one(layers: int, **changes: Any) -> Decoder.Config:
    return decoder(BlockPattern.Config(blocks=(LOCAL, LOCAL, GLOBAL)), layers, **changes)


def test_the_backward_pass_of_a_pattern_stores_no_copy_of_the_parameters():
    """The slice of each layer was stored once: as much memory as all parameters take."""
    wide = block(feed_forward=SwiGLU.Config(hidden=1024))

    def temporary(pattern: Any) -> int:
        graphdef, params = initialise(decoder(pattern, 32, remat="everything"))

        def loss(params: Any) -> jax.Array:
            return bind(graphdef, params).hidden(TOKENS, CONTEXT).x.sum()

        memory = jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    stack = 32 * 3 * 16 * 1024 * 4
    assert temporary(BlockPattern.Config(blocks=(wide,) * 4)) < temporary(wide) + 0.5 * stack


@pytest.mark.slow
@pytest.mark.numerics
def test_a_pattern_is_its_layers_one_after_another():
    """Two rounds and a rest; that the gradient is right, the families' parity with torch shows."""
    graphdef, params = initialise(decoder(BlockPattern.Config(blocks=(LOCAL, GLOBAL)), 5, remat="everything"))
    found = jax.jit(lambda p: bind(graphdef, p).hidden(TOKENS, CONTEXT).x)(params)
    model = bind(graphdef, params)
    kinds = [jax.jit(lambda layer, x: layer(x, CONTEXT, None)[0]) for _ in range(2)]
    x = model.embedding(TOKENS, jnp.float32)
    for index, layer in enumerate(model.blocks()):
        x = kinds[index % 2](layer, x)
    live = SEGMENTS > 0
    np.testing.assert_allclose(found[live], model.norm(x)[live], atol=2e-5)


@pytest.mark.slow
def test_each_layer_is_of_the_kind_that_stands_at_its_place():
    graphdef, params = initialise(two_to_one(7))
    model = bind(graphdef, params)
    assert [layer.attention.rules.window for layer in model.blocks()] == [2, 2, None, 2, 2, None, 2]
    bases = [round(1 / layer.attention.rope.freq[1] ** 4) for layer in model.blocks()]
    assert bases == [10_000, 10_000, 500] * 2 + [10_000]
    assert params["layers"]["feed_forward"]["up_df"].shape == (6, 16, 24)
    assert params["tail"]["feed_forward"]["up_df"].shape == (1, 16, 24)
    few = build_abstract(two_to_one(2))  # less than a round
    assert [layer.attention.rules.window for layer, _ in few.kinds()] == [2, 2] and few.tail is None


@pytest.mark.slow
def test_unstacked_layers_have_the_parameters_of_their_places():
    graphdef, params = initialise(two_to_one(5))
    model = bind(graphdef, params)
    layers = model.unstack_params(params)["layers"]
    np.testing.assert_array_equal(layers[4]["attention"]["q_dkqh"], params["tail"]["attention"]["q_dkqh"][1])
    again = split(bind(graphdef, params).unstack())[1]
    jax.tree.map(np.testing.assert_array_equal, again["layers"], layers)


def test_flops_count_each_window():
    pattern, work = two_to_one(7), rows_workload(3, 8)
    plain = model_flops(decoder(GLOBAL, 7), work)
    fewer_pairs = causal_pairs(3, 8) - causal_pairs(3, 8, 2)
    assert model_flops(pattern, work) == plain - 5 * 2 * fewer_pairs * 2 * (8 + 8)


def test_mixtures_of_several_kinds_have_no_record():
    def built(record: bool) -> Decoder:
        other = block(feed_forward=mixture(record).set(num_experts=2))
        pattern = BlockPattern.Config(blocks=(block(feed_forward=mixture(record)),), leading=other, num_leading=1)
        return jax.eval_shape(lambda: decoder(pattern, 3).build(rngs=nnx.Rngs(0)))

    assert built(False).has_experts and built(False).routing_layout is None
    with pytest.raises(UserError, match="layers with mixtures of 2 kinds; expected the same num_experts, top_k and"):
        _ = built(True).routing_layout


@pytest.mark.slow
def test_layers_without_experts_have_no_routing_to_record_or_replay():
    blocks = (block(window=2, feed_forward=mixture()), block(feed_forward=mixture()))
    graphdef, params = initialise(decoder(BlockPattern.Config(blocks=blocks, leading=block(), num_leading=2), 4))
    router = params["layers"]["feed_forward"]["router"]
    others = {"weight_de": -router["weight_de"]}
    layers = {**params["layers"], "feed_forward": {**params["layers"]["feed_forward"], "router": others}}
    run = jax.jit(lambda params, routing: bind(graphdef, params).hidden(TOKENS, CONTEXT, routing=routing).aux)
    first, free = run(params, None), run({**params, "layers": layers}, None)
    again = run({**params, "layers": layers}, first.routing)
    assert first.routing.shape == (4, 2, 8, 2)
    live = np.asarray(CONTEXT.segment_ids) != 0
    assert np.all(first.routing[:2] == -1) and np.all(first.routing[2:][:, live] >= 0)
    assert not live.all() and np.all(first.routing[2:][:, ~live] == PADDING)
    np.testing.assert_array_equal(again.routing, first.routing)
    assert np.any(free.routing != first.routing)  # the other routers choose others
    # Metrics are means over the two layers that have them.
    assert set(first.metrics) == {"expert_load_max", "router_entropy", "expert_rounds_max"}
    assert 0.5 < first.metrics["router_entropy"] < np.log(4)


@pytest.mark.slow
@pytest.mark.numerics
def test_norms_behind_the_layers_are_applied_to_what_is_added():
    cfg = SandwichBlock.Config(dim=16, attention=LOCAL.attention, feed_forward=LOCAL.feed_forward)
    graphdef, params = initialise(cfg)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 16)), jnp.float32)

    @jax.jit
    def both(params: Any) -> Any:
        layer = bind(graphdef, params)
        y = x + layer.attention_post_norm(layer.attention(layer.attention_norm(x), CONTEXT, None)[0])
        y = y + layer.feed_forward_post_norm(layer.feed_forward(layer.feed_forward_norm(y))[0])
        return layer(x, CONTEXT, None)[0], y

    found, expected = both(params)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    silent = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * ("post_norm" not in str(path)), params)
    np.testing.assert_array_equal(both(silent)[0], x)


def test_blocks_of_other_parameters_are_refused_in_the_pattern():
    cfg = decoder(BlockPattern.Config(blocks=(LOCAL, block(feed_forward=SwiGLU.Config(hidden=32)))), 4)
    with pytest.raises(ConfigError, match=r"blocks\.1: expected the parameters of blocks\.0"):
        build_abstract(cfg)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (BlockPattern.Config(blocks=()), "blocks: expected one block or more"),
        (BlockPattern.Config(blocks=(LOCAL,), num_leading=1), "leading: expected a block for num_leading layers"),
        (BlockPattern.Config(blocks=(LOCAL,), leading=LOCAL, num_leading=4), "num_leading: expected less than"),
    ],
)
def test_patterns_that_make_no_stack_are_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: decoder(pattern, 4).build(rngs=nnx.Rngs(0)))


def test_layers_with_caches_of_other_shapes_are_refused():
    wide = block()
    wide.attention.num_kv_heads = 2
    cfg = decoder(BlockPattern.Config(blocks=(LOCAL,), leading=wide, num_leading=1), 2)
    with pytest.raises(UserError, match=r"caches of different shapes \[\(1, 8\), \(2, 8\)\]"):
        build_abstract(cfg)


STAGES = make_mesh({"pipeline": 2, "fsdp": 2}, jax.devices()[:1] * 4).abstract_mesh


@pytest.mark.parametrize(
    ("pattern", "layers", "message"),
    [
        (BlockPattern.Config(blocks=(LOCAL, GLOBAL)), 5, r"layers \(4\), tail \(1\) are stacks of their own"),
        (BlockPattern.Config(blocks=(LOCAL, GLOBAL)), 6, r"expected a multiple of 2 layers a stage"),
        (BlockPattern.Config(blocks=(LOCAL, GLOBAL)), 8, None),
    ],
)
def test_a_pipeline_has_whole_rounds_in_each_stage_or_is_refused(pattern, layers, message):
    def trace() -> None:
        with jax.sharding.use_abstract_mesh(STAGES):
            tokens = jnp.zeros((16, 8), jnp.int32)
            decoder(pattern, layers).build(rngs=nnx.Rngs(0)).hidden(tokens, PackedContext(tokens, tokens))

    if message is None:
        jax.eval_shape(trace)
    else:
        with pytest.raises(UserError, match=message):
            jax.eval_shape(trace)


def test_rows_longer_than_the_rotary_positions_of_one_kind_are_refused():
    short = GLOBAL.clone()
    short.attention.rope = Rope.Config(max_length=6)
    with pytest.raises(ConfigError, match=r"model\.block\.blocks\.1\.attention\.rope\.max_length is 6"):
        check_length(decoder(BlockPattern.Config(blocks=(LOCAL, short)), 4), 8, "seq_len")
