"""Wrappers stand where the layer stood: what parents hand down and read, and how they are taken off again."""

import pytest

from axlearn_like.config import ConfigError, from_text, get_path, replace, set_path, to_text
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import bind
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.quantised import QuantisedWeights
from axlearn_like.operations.flops import model_flops, rows_workload
from tests.axlearn_like.layers.small import initialise, small_decoder


def wrapped_twice() -> Block.Config:
    return Block.Config(attention=LoRA.Config(inner=QuantisedWeights.Config(inner=Attention.Config(num_heads=4))))


def test_fields_of_others_go_to_a_copy_of_the_inner_config():
    inner = Attention.Config(num_heads=2)
    cfg = LoRA.Config(inner=inner)
    assert cfg.set(dim=16, rank=3) is cfg
    assert (cfg.rank, get_path(cfg, "inner.dim")) == (3, 16)
    assert cfg.num_heads == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert inner == Attention.Config(num_heads=2)


def test_an_edit_that_fails_changes_nothing():
    cfg = LoRA.Config(inner=Attention.Config(num_heads=2))
    for values in ({"dim": "wide", "rank": 4}, {"rank": "high", "dim": 4}):
        with pytest.raises(ConfigError):
            cfg.set(**values)
    with pytest.raises(AttributeError, match=r"Attention.Config has no field 'num_head'; did you mean 'num_heads'"):
        cfg.set(num_head=3)
    assert cfg == LoRA.Config(inner=Attention.Config(num_heads=2))
    with pytest.raises(AttributeError, match="num_head"):
        _ = cfg.num_head  # pyright: ignore[reportAttributeAccessIssue]


def test_paths_and_text_go_through():
    cfg = small_decoder(block=wrapped_twice())
    set_path(cfg, "block.attention.inner.inner.window", 3)
    again = from_text(to_text(cfg))
    assert again == cfg and "block.attention.inner.inner.window: 3" in to_text(cfg)


def test_without_wrappers_it_is_the_plain_config():
    cfg = small_decoder(block=wrapped_twice())
    before = to_text(cfg)
    assert plain_config(cfg) == small_decoder(block=Block.Config(attention=Attention.Config(num_heads=4)))
    assert to_text(cfg) == before


def test_a_parent_reads_what_the_layer_has():
    block = wrapped_twice().set(feed_forward=SwiGLU.Config(hidden=8))
    graphdef, params = initialise(small_decoder(block=block))
    model = bind(graphdef, params)
    assert model.cache_shape == (4, 8) and model.layers.attention.query_shape == (4, 1, 8)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.layers.attention.nothing_like_it


def test_flops_of_rounded_weights_are_those_of_the_model():
    plain = small_decoder()
    set_path(plain, "block.attention.head_dim", 8)
    cfg = plain.clone()
    replace(cfg, Attention.Config, lambda attention: QuantisedWeights.Config(inner=attention))

    def flops(model: Decoder.Config) -> float:
        return model_flops(model, rows_workload(1, 10))

    assert flops(cfg) == flops(plain)
