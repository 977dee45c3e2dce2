"""Model FLOPs against the matrix products of a traced forward pass without any loop, and against published sizes."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import bind, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.operations.flops import causal_pairs, decoder_flops, matrix_sizes, pair_flops
from mesh.cost.arithmetic import products
from models.dense import dense
from models.llama import llama
from models.qwen import qwen


def small(*, tied: bool):
    return dense(
        vocab_size=128, dim=64, hidden=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
        theta=1e4, eps=1e-5, tied=tied, qkv_bias=True, qk_norm=True,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_forward_pass_has_the_products_that_are_counted(tied):
    cfg, rows, length = small(tied=tied), 2, 64
    graphdef, params = split(jax.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))))

    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        return bind(graphdef, params)(tokens, PackedContext(positions, jnp.ones_like(tokens)))

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    traced = products(jax.make_jaxpr(forward)(params, tokens)).total
    every_pair = rows * length * length  # the plain attention computes the other half too, and throws it away
    count = rows * length
    assert traced == decoder_flops(cfg, tokens=count, head_tokens=count, pairs=every_pair)
    causal = decoder_flops(cfg, tokens=count, head_tokens=count, pairs=causal_pairs(rows, length))
    assert traced - causal == rows * length * (length - 1) / 2 * pair_flops(cfg)
    assert decoder_flops(cfg, tokens=count, head_tokens=count, pairs=every_pair, backward=True) == 3 * traced


def test_sizes_are_those_that_the_models_are_known_by():
    """Parameters in layers and head: config.json of each model, embeddings and vectors left out."""
    layers, head = matrix_sizes(llama("Llama-3.1-8B"))
    assert layers == 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert head == 128_256 * 4096
    layers, head = matrix_sizes(qwen("QwQ-32B"))
    assert layers + head == pytest.approx(32.8e9 - 152_064 * 5120, rel=0.01)


def test_of_a_mixture_of_experts_a_token_meets_a_few():
    cfg = small(tied=False)
    cfg.block.feed_forward = MoE.Config(
        num_experts=8, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=48)
    )
    attention = 64 * 4 * 32 * 2 + 2 * 64 * 2 * 32
    assert matrix_sizes(cfg) == (3 * (attention + 64 * 8 + 2 * 3 * 64 * 48), 128 * 64)


def test_latent_attention_has_keys_and_values_of_different_widths():
    cfg = small(tied=False)
    cfg.block.attention = LatentAttention.Config(num_heads=4, nope_dim=16, rope_dim=8, value_dim=12)
    assert pair_flops(cfg) == 2 * 3 * 4 * (16 + 8 + 12)


def test_pairs_are_the_causal_half_and_what_the_window_leaves():
    assert causal_pairs(1, 4) == 1 + 2 + 3 + 4
    assert causal_pairs(3, 100) == 3 * 5050
    assert causal_pairs(1, 5, window=2) == 1 + 2 + 2 + 2 + 2
    assert causal_pairs(1, 5, window=9) == causal_pairs(1, 5)
