"""Mixtures of experts use as many parameters for a token as published, and are as their `config.json` files say."""

import jax
import pytest

from axlearn_like.config import ConfigBase
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from mesh import UserError
from models.moe import deepseek_v3_feed_forward, moe, tiny_moe
from models.tiny import tiny

# As the models' authors give them, in billions.
ACTIVE = {"Qwen3-30B-A3B": 3.3, "Qwen3-235B-A22B": 22.0, "Mixtral-8x7B": 12.9, "Mixtral-8x22B": 39.0}


def sizes(cfg: ConfigBase) -> dict[str, int]:
    params = split(build_abstract(cfg))[1]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.size for path, leaf in leaves}


def feed_forward(cfg: Decoder.Config) -> MoE.Config:
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.feed_forward, MoE.Config)
    return cfg.block.feed_forward


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_as_many_parameters_as_the_authors_say(name):
    cfg = moe(name)
    count = sizes(cfg)
    layer = feed_forward(cfg)
    assert isinstance(layer.router, SoftmaxRouter.Config)
    experts = sum(size for path, size in count.items() if ".experts." in path)
    active = sum(count.values()) - experts + experts * layer.router.top_k // layer.num_experts
    assert active / 1e9 == pytest.approx(ACTIVE[name], abs=0.25)


@pytest.mark.parametrize(
    ("name", "theta", "eps", "qk_norm"),
    [
        ("Qwen3-30B-A3B", 1_000_000.0, 1e-6, True),
        ("Qwen3-235B-A22B", 1_000_000.0, 1e-6, True),
        ("Mixtral-8x7B", 1_000_000.0, 1e-5, False),
    ],
)
def test_what_the_count_does_not_show(name, theta, eps, qk_norm):
    cfg = moe(name)
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.attention, Attention.Config)
    rope = cfg.block.attention.rope
    assert isinstance(rope, Rope.Config)
    assert (rope.theta, cfg.norm.eps, cfg.block.norm.eps) == (theta, eps, eps)
    assert (cfg.block.attention.qk_norm is not None) == qk_norm
    router = feed_forward(cfg).router
    assert isinstance(router, SoftmaxRouter.Config) and router.renormalise


def test_deepseeks_layer_has_the_published_size():
    """The published tensors of layer 3: `mlp.experts`, `mlp.shared_experts`, `mlp.gate` and its bias."""
    count = sizes(deepseek_v3_feed_forward().set(dim=7168))
    matrix = 3 * 7168 * 2048
    assert sum(count.values()) == 256 * matrix + matrix + 256 * 7168 + 256


def test_the_tiny_one_uses_as_many_parameters_for_a_token_as_the_dense_one():
    dense, sparse = sizes(tiny(vocab_size=272)), sizes(tiny_moe(vocab_size=272))
    experts = sum(size for path, size in sparse.items() if ".experts." in path)
    routers = sum(size for path, size in sparse.items() if ".router." in path)
    assert sum(sparse.values()) - experts * 6 // 8 - routers == sum(dense.values())


def test_a_wrong_name_is_answered_with_the_right_one():
    with pytest.raises(UserError, match=r"'Qwen3-30b-A3B'; did you mean 'Qwen3-30B-A3B'"):
        moe("Qwen3-30b-A3B")
