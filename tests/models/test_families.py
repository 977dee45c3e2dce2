"""Published models have as many parameters as published, counted without allocating any."""

import jax
import pytest

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Llama3Scaling, Rope
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from mesh.errors import UserError
from models.llama import LLAMA, llama
from models.qwen import QWEN, qwen

# Sums over the tensors of the published safetensors files (a tied head counted once).
PUBLISHED = {
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen2-0.5B": 494_032_768,
    "Qwen2-1.5B": 1_543_714_304,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "QwQ-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}


def config(name: str) -> Decoder.Config:
    return llama(name) if name in LLAMA else qwen(name)


def attention(cfg: Decoder.Config) -> Attention.Config:
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.attention, Attention.Config)
    return cfg.block.attention


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    cfg = config(name)
    params = split(build_abstract(cfg))[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PUBLISHED[name]


def test_every_model_is_counted():
    instruct = {name for name in QWEN if name.endswith("-Instruct")}
    assert {*LLAMA, *QWEN} - instruct == set(PUBLISHED)
    for name in instruct:  # the same shape, and all with the small epsilon
        assert qwen(name).norm.eps == 1e-6
        tuned, base = qwen(name), qwen(name.removesuffix("-Instruct"))
        assert (tuned.dim, tuned.num_layers, tuned.vocab_size) == (base.dim, base.num_layers, base.vocab_size)


@pytest.mark.parametrize(
    ("name", "theta", "eps", "factor"),
    [
        ("Llama-3-8B", 500_000.0, 1e-5, None),
        ("Llama-3.1-70B", 500_000.0, 1e-5, 8.0),
        ("Llama-3.2-1B", 500_000.0, 1e-5, 32.0),
        ("Qwen2-7B", 1_000_000.0, 1e-6, None),
        ("Qwen2.5-32B", 1_000_000.0, 1e-5, None),
        ("Qwen2.5-32B-Instruct", 1_000_000.0, 1e-6, None),
        ("QwQ-32B", 1_000_000.0, 1e-5, None),
        ("Qwen3-8B", 1_000_000.0, 1e-6, None),
    ],
)
def test_what_the_count_does_not_show(name, theta, eps, factor):
    cfg = config(name)
    rope, block = attention(cfg).rope, cfg.block
    assert isinstance(block, Block.Config) and isinstance(rope, Rope.Config)
    assert (rope.theta, cfg.norm.eps, block.norm.eps) == (theta, eps, eps)
    if factor is None:
        assert rope.scaling is None
    else:
        assert rope.scaling == Llama3Scaling.Config(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
        )


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
