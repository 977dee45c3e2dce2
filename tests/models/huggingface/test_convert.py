"""Conversion against transformers: golden files made by tests/golden/reference/decoders.py."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Decoder
from models.huggingface.architectures import read_decoder
from models.huggingface.config_json import ConfigJson
from models.huggingface.convert import from_huggingface, to_huggingface
from models.huggingface.rows import ConversionError
from models.tiny import tiny

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = [f"{family}_{head}" for family in ("llama", "qwen2", "qwen3", "qwen3moe") for head in ("tied", "untied")]


def load(name: str) -> tuple[Decoder.Config, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The config here, the tensors under their names there, and the batch."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    theirs = json.loads(str(arrays.pop("config")))
    weights = {key.removeprefix("weights/"): arrays.pop(key) for key in list(arrays) if "/" in key}
    return our_config(theirs), weights, arrays


def our_config(theirs: dict[str, Any]) -> Decoder.Config:
    """The decoder that the model's `config.json` describes."""
    family = theirs["family"]
    name = {"qwen3moe": "Qwen3Moe"}.get(family, family.capitalize())
    fields = {key: value for key, value in theirs.items() if key not in ("family", "tied")}
    fields |= {"architectures": [f"{name}ForCausalLM"], "tie_word_embeddings": theirs["tied"]}
    return read_decoder(ConfigJson(fields))[1]


@pytest.mark.numerics
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    cfg, weights, batch = load(name)
    params = from_huggingface(weights, cfg)
    graphdef, _ = split(build_abstract(cfg))
    context = PackedContext(jnp.asarray(batch["positions"]), jnp.asarray(batch["segment_ids"]))
    logits = jax.jit(lambda p, t, c: bind(graphdef, p)(t, c))(params, batch["tokens"], context)
    live = batch["segment_ids"] > 0
    assert np.std(batch["logits"][live]) > 0.3
    np.testing.assert_allclose(np.asarray(logits)[live], batch["logits"][live], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_round_trip_is_exact(name):
    cfg, weights, _ = load(name)
    back = to_huggingface(from_huggingface(weights, cfg), cfg)
    assert back.keys() == weights.keys()
    for key, tensor in weights.items():
        assert back[key].flags.c_contiguous
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)


def test_the_round_trip_is_exact_in_bfloat16_too():
    cfg, weights, _ = load("qwen3_untied")
    short = {key: tensor.astype(jnp.bfloat16) for key, tensor in weights.items()}
    params = from_huggingface(short, cfg)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    back = to_huggingface(params, cfg, dtype=jnp.bfloat16)
    for key, tensor in short.items():
        assert back[key].dtype == tensor.dtype
        np.testing.assert_array_equal(back[key].view(np.uint16), tensor.view(np.uint16), err_msg=key)


def test_parameters_are_those_that_the_config_builds():
    cfg, weights, _ = load("qwen2_untied")
    built = split(build_abstract(cfg))[1]
    ours = from_huggingface(weights, cfg)
    assert jax.tree.structure(ours) == jax.tree.structure(built)
    assert [a.shape for a in jax.tree.leaves(ours)] == [a.shape for a in jax.tree.leaves(built)]


def test_a_query_head_lies_with_its_key_value_head():
    cfg, weights, _ = load("llama_tied")  # 8 query heads, 2 key/value heads, width 8
    ours = from_huggingface(weights, cfg)["layers"]["attention"]
    theirs = weights["model.layers.1.self_attn.q_proj.weight"]
    for head in range(8):
        np.testing.assert_array_equal(ours["q_dkqh"][1, :, head // 4, head % 4].T, theirs[8 * head : 8 * head + 8])


def test_an_expert_is_the_one_of_its_number():
    cfg, weights, _ = load("qwen3moe_untied")
    ours = from_huggingface(weights, cfg)["layers"]["feed_forward"]["experts"]
    theirs = weights["model.layers.1.mlp.experts.5.down_proj.weight"]
    np.testing.assert_array_equal(ours["down_efd"][1, 5], theirs.T)


def test_missing_and_unknown_tensors_are_named():
    cfg, weights, _ = load("llama_untied")
    weights["model.layers.1.mlp.gate_project.weight"] = weights.pop("model.layers.1.mlp.gate_proj.weight")
    with pytest.raises(ConversionError) as error:
        from_huggingface(weights, cfg)
    assert "missing: model.layers.1.mlp.gate_proj.weight;" in str(error.value)
    assert "unknown: model.layers.1.mlp.gate_project.weight; did you mean" in str(error.value)


def test_weights_of_another_family_are_refused():
    _, weights, _ = load("qwen2_untied")
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.0\.self_attn\.q_proj\.bias"):
        from_huggingface(weights, load("llama_untied")[0])


def test_a_wrong_shape_is_named_with_both_shapes():
    cfg, weights, _ = load("qwen3_tied")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    with pytest.raises(ConversionError, match=r"wrong shape: model\.norm\.weight \(63,\), expected \(64,\)"):
        from_huggingface(weights, cfg)


def test_a_tied_head_may_be_there_as_a_copy_only():
    cfg, weights, _ = load("qwen3_tied")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    from_huggingface(weights, cfg)
    weights["lm_head.weight"] += 1
    with pytest.raises(ConversionError, match=r"lm_head\.weight is not the copy of model\.embed_tokens\.weight"):
        from_huggingface(weights, cfg)


def test_a_parameter_without_counterpart_is_refused():
    with pytest.raises(ConversionError, match=r"layers\.adapter\.a_dr has no counterpart"):
        to_huggingface({"layers": {"adapter": {"a_dr": np.zeros((2, 3, 1))}}}, tiny(vocab_size=8))


def test_all_parameters_of_a_large_stack_are_listed_briefly():
    with pytest.raises(ConversionError, match=r"\.\.\. \(46 in all\)"):
        from_huggingface({}, tiny(vocab_size=8))
