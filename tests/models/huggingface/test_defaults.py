"""A config.json means what it means to transformers: fields left out, null, or of version 4, and those that count.

Against tests/models/golden/config_json.json, made by tests/golden/reference/defaults.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.decoder import Decoder
from models.huggingface.architectures import config_json, find_architecture, read_decoder, same_function
from models.huggingface.config_json import ConfigJson, ConfigJsonError

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "config_json.json").read_text())
MODELS: dict[str, Any] = GOLDEN["models"]
# Fields that change a model in transformers, and are refused where they do: (model type, or all) -> fields.
REFUSED = {
    "": {"partial_rotary_factor", "rope_scaling"},  # the latter beside a rope_parameters that says something else
    "qwen3_moe": {"hidden_act", "decoder_sparse_step", "mlp_only_layers"},
    "mixtral": {"hidden_act"},
    "gemma3_text": {"use_bidirectional_attention"},
    "gpt2": {"add_cross_attention"},
    "deepseek_v3": {"hidden_act", "attention_bias"},
}
REFUSED_ROPES = (
    "partial_rotary_factor: expected 1",
    "rope_scaling: expected the rotary embedding of rope_parameters",
    "factor: expected 1 or more, got 0.5",
)


def described(kind: str, fields: dict[str, Any]) -> Decoder.Config:
    """The decoder of a file with these fields."""
    return read_decoder(ConfigJson({**fields, "architectures": [MODELS[kind]["architecture"]], "model_type": kind}))[1]


@pytest.mark.parametrize("kind", MODELS)
def test_a_field_that_is_left_out_is_that_of_transformers(kind: str):
    model, wrong = MODELS[kind], []
    whole = described(kind, model["fields"])
    assert described(kind, model["held"]) == whole
    for case in model["without"]:
        fields = older(model["fields"]) if case["form"] == "old" else dict(model["fields"])
        del fields[case["field"]]
        if case["null"]:
            fields[case["field"]] = None
        held = {key: value for key, value in model["held"].items() if key not in case["lacks"]}
        if outcome(kind, fields) != outcome(kind, {**held, **case["differs"]}):
            wrong.append(case)
    assert not wrong
    # None was skipped, but for the one that transformers refuses as a divisor of the width.
    assert {case["field"] for case in model["without"]} | {"num_attention_heads"} >= model["fields"].keys()
    assert (
        sum(
            isinstance(outcome(kind, {**model["held"], **case["differs"]}), Decoder.Config) for case in model["without"]
        )
        > 10
    )


def outcome(kind: str, fields: dict[str, Any]) -> Any:
    """The decoder, or why there is none."""
    try:
        return described(kind, fields)
    except ConfigJsonError as error:
        return str(error)


def older(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields in the form of transformers 4."""
    fields = json.loads(json.dumps(fields))
    rope = fields.pop("rope_parameters")
    far = rope.get("full_attention", rope)
    name = "type" if far is rope else "rope_type"
    fields |= {"rope_theta": far.pop("rope_theta"), "rope_scaling": {name: far.pop("rope_type"), **far}}
    near = rope.get("sliding_attention")
    return fields if near is None else {**fields, "rope_local_base_freq": near["rope_theta"]}


@pytest.mark.parametrize("kind", MODELS)
def test_a_field_that_changes_a_model_in_transformers_changes_ours_or_is_refused(kind: str):
    model = MODELS[kind]
    whole, refused, ignored = described(kind, model["fields"]), set(), set()
    for case in model["changed"]:
        try:
            found = described(kind, {**model["fields"], case["field"]: case["value"]})
        except ConfigJsonError as error:
            assert case["field"] in str(error)
            if case["effect"]:
                refused.add(case["field"])
            continue
        if case["effect"] and same_function(whole, found):
            ignored.add(case["field"])
        if case["effect"] is False:
            assert same_function(whole, found), case
    assert not ignored
    assert refused == {case["field"] for case in model["changed"] if case["effect"]} & (
        REFUSED[""] | REFUSED.get(kind, set())
    )


@pytest.mark.parametrize("case", GOLDEN["ropes"], ids=lambda case: json.dumps(case["fields"])[:70])
def test_a_rotary_embedding_has_the_frequencies_of_transformers(case: dict[str, Any]):
    fields = {**MODELS["llama"]["fields"], "head_dim": 16, "max_position_embeddings": 64, **case["fields"]}
    if "rope_parameters" not in case["fields"]:
        del fields["rope_parameters"]
    try:
        rope = described("llama", fields).block.attention.rope  # pyright: ignore[reportAttributeAccessIssue]
        made: Rope = rope.clone(head_dim=16).build(rngs=None)
    except (ConfigJsonError, ConfigError) as error:
        assert any(part in str(error) for part in REFUSED_ROPES), error
        return
    assert made.freq == pytest.approx(case["frequencies"], rel=1e-6)
    assert made.factor == pytest.approx(case["factor"], rel=1e-12)
    if "long" in case:
        made = rope.clone(head_dim=16, max_length=64 + rope.max_length).build(rngs=None)
        assert made.freq == pytest.approx(case["long"], rel=1e-6)
        assert not np.allclose(case["long"], case["frequencies"])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_stretched_model_is_exported_as_what_it_was(kind: str):
    """The user's `max_length` is no field of config.json: its lengths there say what the frequencies are."""
    scaling = {"factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": kind, "rope_theta": 1e4, **(scaling if kind == "longrope" else {"factor": 2.0})}
    more = {"original_max_position_embeddings": 32} if kind == "longrope" else {}
    fields = {
        **MODELS["llama"]["fields"],
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_parameters": rope,
        **more,
    }
    cfg = described("llama", fields)
    cfg.block.attention.rope.set(max_length=200)  # pyright: ignore[reportAttributeAccessIssue]
    assert same_function(described("llama", written := config_json(cfg)), cfg)
    assert written["max_position_embeddings"] == 64


def test_every_field_of_the_table_is_known():
    for kind, model in MODELS.items():
        file = ConfigJson({**model["fields"], "architectures": [model["architecture"]], "model_type": kind})
        architecture, _ = read_decoder(file)
        assert architecture.name == find_architecture(file).name == model["architecture"]
        assert not file.unread()
