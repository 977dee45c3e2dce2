"""Classifiers and reward models against transformers: golden files made by tests/golden/reference/heads.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.heads import ScoreHead
from models.huggingface.architectures import architecture_for, config_json, read_decoder
from models.huggingface.config_json import ConfigJson, ConfigJsonError
from models.huggingface.convert import from_huggingface, to_huggingface
from models.huggingface.rows import ConversionError
from models.tiny import tiny

pytestmark = pytest.mark.numerics

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*Classification.npz"))


SHORT = ("LlamaForSequenceClassification", "Qwen2ForTokenClassification")  # a class of each kind


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.full) for n in NAMES])
def test_scores_are_those_of_transformers_and_the_round_trip_is_exact(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    fields = json.loads(str(arrays.pop("config")))
    weights = {key.removeprefix("weights/"): arrays.pop(key) for key in list(arrays) if "/" in key}
    cfg = read_decoder(ConfigJson(fields))[1].set(dtype="float32")
    params = from_huggingface(weights, cfg)
    graphdef, _ = split(build_abstract(cfg))
    context = PackedContext(jnp.asarray(arrays["positions"]), jnp.asarray(arrays["segment_ids"]))

    @jax.jit
    def scores(params: dict, tokens: jax.Array) -> jax.Array:
        model = bind(graphdef, params)
        return model.scores(model.hidden(tokens, context).x, context)

    there = ~np.isnan(arrays["scores"])
    assert np.std(arrays["scores"][there]) > 0.1
    assert there[..., 0].sum() == (3 if "Sequence" in name else 23)
    np.testing.assert_allclose(np.asarray(scores(params, arrays["tokens"]))[there], arrays["scores"][there], atol=2e-5)
    back = to_huggingface(params, cfg)
    assert back.keys() == weights.keys()
    for key, tensor in weights.items():
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)
    assert architecture_for(cfg).name == name
    again = config_json(cfg)
    assert len(again["id2label"]) == len(again["label2id"]) == arrays["scores"].shape[-1]


def test_what_has_no_counterpart_is_refused():
    cfg = tiny(vocab_size=32)
    with pytest.raises(ConversionError, match=r"has not head\.pooling"):
        architecture_for(cfg.clone(head=ScoreHead.Config(pooling="mean")))
    fields = {**config_json(cfg.clone(head=ScoreHead.Config())), "architectures": ["LlamaForSequenceClasification"]}
    with pytest.raises(ConfigJsonError, match="LlamaForSequenceClassification"):
        read_decoder(ConfigJson(fields))
