"""Gemma, Mistral, gpt-oss, GPT-2 and DeepSeek-V3 are as their `config.json` files say, beyond their sizes."""

from typing import Any

import pytest

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.attention.rope_scaling import LinearScaling, YarnScaling
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.decoder import Decoder
from axlearn_like.operations.flops import active_weights
from mesh.errors import UserError
from models.catalog import published_model
from models.deepseek import deepseek
from models.gemma import gemma
from models.gpt2 import gpt2
from models.gpt_oss import gpt_oss
from models.mistral import mistral


def built(cfg: Decoder.Config) -> Any:
    return build_abstract(cfg)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.6), ("gpt-oss-120b", 5.1), ("DeepSeek-V3", 37.0)])
def test_a_token_meets_as_many_as_the_authors_say(name, billions):
    """The cards of gpt-oss count the head and not the embedding, as here; DeepSeek counts both."""
    cfg = published_model(name)
    embedding = cfg.vocab_size * cfg.dim if name == "DeepSeek-V3" else 0
    assert (active_weights(cfg) + embedding) / 1e9 == pytest.approx(billions, abs=0.6)


def layers(name: str) -> list[Attention]:
    model = built(published_model(name))
    period = [(segment.count, [block.attention for block, _ in model.kinds()]) for segment in model.segments[:1]]
    (count, kinds), rest = period[0], model.num_layers
    assert rest >= count
    return [kinds[index % model.segments[0].period] for index in range(rest)]


@pytest.mark.parametrize(
    ("name", "windows", "full"),
    [
        ("Gemma-2-2B", [4096, None], 13),
        ("Gemma-3-270M", [512] * 5 + [None], 3),
        ("Gemma-3-27B", [1024] * 5 + [None], 10),
        ("gpt-oss-20b", [128, None], 12),
        ("Mistral-7B-v0.1", [4096], 0),
        ("Mistral-7B-v0.3", [None], 32),
    ],
)
def test_windows_stand_at_the_published_layers(name, windows, full):
    found = [attention.rules.window for attention in layers(name)]
    assert found[: len(windows)] == windows
    assert found.count(None) == full


def rope(name: str, kind: int) -> Rope.Config:
    cfg: Any = published_model(name).block
    return cfg.blocks[kind].attention.rope


def test_gemma_3_turns_slowly_where_it_sees_far():
    near, far = rope("Gemma-3-4B", 0), rope("Gemma-3-4B", 5)
    assert (near.theta, near.scaling) == (1e4, None)
    assert (far.theta, far.scaling) == (1e6, LinearScaling.Config(factor=8.0))
    assert rope("Gemma-3-1B", 5).scaling is None


def test_gemma_2_caps_and_gemma_3_normalises():
    second, third = gemma("Gemma-2-27B"), gemma("Gemma-3-27B")
    a, b = (cfg.block.blocks[0].attention for cfg in (second, third))  # pyright: ignore
    assert (a.soft_cap, a.scale, a.qk_norm) == (50.0, 144**-0.5, None)
    assert (b.soft_cap, b.scale) == (None, 168**-0.5) and b.qk_norm is not None
    assert second.embedding.logit_soft_cap == 30.0 and third.embedding.logit_soft_cap is None  # pyright: ignore


def test_deepseek_puts_yarns_correction_into_the_scores():
    attention: Any = deepseek("DeepSeek-V3").block.leading.attention  # pyright: ignore
    assert attention.rope.scaling == YarnScaling.Config(
        factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0
    )
    assert attention.rope.scaling.build().attention_factor == 1
    # 0.1 ln 40 + 1 = 1.3689, squared.
    assert attention.scale == pytest.approx(192**-0.5 * 1.3688879**2)


@pytest.mark.parametrize("make", [gemma, mistral, gpt2, gpt_oss, deepseek])
def test_a_wrong_name_is_answered_with_the_right_ones(make):
    with pytest.raises(UserError, match=r"no .* model 'x'; (did you mean|known|there)"):
        make("x")
