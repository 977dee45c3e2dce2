"""Llama and Qwen are as their `config.json` files say, beyond the sizes that test_catalog.py counts."""

import pytest

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Llama3Scaling, Rope
from axlearn_like.layers.decoder import Block, Decoder
from mesh.errors import UserError
from models.catalog import published_model
from models.llama import llama
from models.qwen import qwen


def attention(cfg: Decoder.Config) -> Attention.Config:
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.attention, Attention.Config)
    return cfg.block.attention


@pytest.mark.parametrize(
    ("name", "theta", "eps", "factor"),
    [
        ("Llama-3-8B", 500_000.0, 1e-5, None),
        ("Llama-3.1-70B", 500_000.0, 1e-5, 8.0),
        ("Llama-3.2-1B", 500_000.0, 1e-5, 32.0),
        ("Llama-2-7B", 10_000.0, 1e-5, None),
        ("Qwen2-7B", 1_000_000.0, 1e-6, None),
        ("Qwen2-72B", 1_000_000.0, 1e-5, None),
        ("Qwen2-72B-Instruct", 1_000_000.0, 1e-6, None),
        ("Qwen2.5-32B", 1_000_000.0, 1e-5, None),
        ("Qwen2.5-32B-Instruct", 1_000_000.0, 1e-6, None),
        ("Qwen2.5-72B", 1_000_000.0, 1e-5, None),
        ("Qwen2.5-72B-Instruct", 1_000_000.0, 1e-6, None),
        ("QwQ-32B", 1_000_000.0, 1e-5, None),
        ("Qwen3-8B", 1_000_000.0, 1e-6, None),
    ],
)
def test_what_the_count_does_not_show(name, theta, eps, factor):
    cfg = published_model(name)
    rope, block = attention(cfg).rope, cfg.block
    assert isinstance(block, Block.Config) and isinstance(rope, Rope.Config)
    assert (rope.theta, cfg.norm.eps, block.norm.eps) == (theta, eps, eps)
    if factor is None:
        assert rope.scaling is None
    else:
        assert rope.scaling == Llama3Scaling.Config(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
        )


def test_instruct_models_of_qwen_have_the_small_epsilon_in_all_sizes():
    names = [name for name in qwen.names if name.endswith("-Instruct")]
    assert len(names) == 4 + 7
    assert {(qwen(name).norm.eps, attention(qwen(name)).rope.max_length) for name in names} == {(1e-6, 32_768)}  # pyright: ignore


def test_generations_of_qwen_differ_in_bias_and_norm():
    second, third = attention(qwen("Qwen2.5-7B")), attention(qwen("Qwen3-8B"))
    assert second.qkv_bias and second.qk_norm is None
    assert not third.qkv_bias and third.qk_norm is not None and third.qk_norm.eps == 1e-6


def test_a_wrong_name_is_answered_with_the_right_one():
    with pytest.raises(UserError, match=r"'Qwen3-8b'; did you mean 'Qwen3-8B'"):
        qwen("Qwen3-8b")
    with pytest.raises(UserError, match=r"'llama-3.2-1B'; did you mean 'Llama-3.2-1B'"):
        llama("llama-3.2-1B")


def test_a_config_is_the_callers_own():
    qwen("Qwen3-0.6B").set(num_layers=1)
    assert qwen("Qwen3-0.6B").num_layers == 28
