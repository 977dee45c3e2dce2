"""Gemma 2, and the text model of Gemma 3."""

from typing import Any

from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.block_pattern import BlockPattern, first_block
from axlearn_like.layers.decoder import Decoder, SandwichBlock
from axlearn_like.layers.embedding import CappedHead, Head, ScaledEmbedding
from models.gemma import gemma2, gemma3
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import ACTIVATIONS, ATTENTION, FEED_FORWARD, read_sizes, with_biases, write_sizes
from models.huggingface.families.patterns import attentions, first_of, read_kinds, write_kinds
from models.huggingface.rope import read_lengths, read_rope, rope_of, rope_parameters, write_rope
from models.huggingface.rows import Row

_LAYER = "model.layers.{}"
_ROWS: dict[str, Row] = {
    **ATTENTION,
    **FEED_FORWARD,
    "attention_post_norm.scale": Row(f"{_LAYER}.post_attention_layernorm.weight", "d"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.pre_feedforward_layernorm.weight", "d"),
    "feed_forward_post_norm.scale": Row(f"{_LAYER}.post_feedforward_layernorm.weight", "d"),
}
_CAPS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}


def _read_shape(json: ConfigJson, kinds: tuple[bool, ...]) -> dict[str, Any]:
    json.ignore("hidden_act")  # transformers looks at the other one alone
    json.only("use_bidirectional_attention", False)
    return {
        **read_sizes(json),
        "hidden": json.integer("intermediate_size"),
        "heads": (json.integer("num_attention_heads"), json.integer("num_key_value_heads"), json.count("head_dim")),
        "scalar": json.number("query_pre_attn_scalar", positive=True),
        "window": json.integer("sliding_window"),
        "kinds": read_kinds(json, kinds),
    }


def _finished(cfg: Decoder.Config, json: ConfigJson) -> Decoder.Config:
    """Set the activation, biases and the head of a decoder."""
    activation = json.choice("hidden_activation", ACTIVATIONS)
    blocks: Any = cfg.block.blocks if isinstance(cfg.block, BlockPattern.Config) else (cfg.block,)
    for block in blocks:
        block.feed_forward.set(activation=activation)
        block.set(attention=with_biases(block.attention, json))
    if not json.flag("tie_word_embeddings"):
        cap = cfg.embedding.logit_soft_cap  # pyright: ignore[reportAttributeAccessIssue]
        cfg.set(
            embedding=ScaledEmbedding.Config(),
            head=Head.Config() if cap is None else CappedHead.Config(logit_soft_cap=cap),
        )
    return cfg


def _write_shape(cfg: Decoder.Config) -> dict[str, Any]:
    block: Any = first_block(cfg.block)
    if not (isinstance(block, SandwichBlock.Config) and isinstance(cfg.embedding, ScaledEmbedding.Config)):
        raise AttributeError("blocks of another kind")
    attention: Any = block.attention
    scalar = attention.scale**-2
    glu: Any = block.feed_forward
    activation = {value: name for name, value in reversed(ACTIVATIONS.items()) if name != "gelu_new"}[glu.activation]
    return {
        **write_sizes(cfg, 8192),
        "intermediate_size": glu.hidden,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
        "hidden_activation": activation,
        "hidden_act": activation,
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": getattr(cfg.embedding if cfg.head is None else cfg.head, "logit_soft_cap", None),
        **write_kinds(cfg),
    }


def _read_gemma2(json: ConfigJson) -> Decoder.Config:
    caps = {name: json.number(field, None, positive=True) for name, field in _CAPS.items()}
    json.ignore("cache_implementation", "sliding_window_size")
    return _finished(gemma2(rope=read_rope(json), **caps, **_read_shape(json, (True, False))), json)


def _write_gemma2(cfg: Decoder.Config) -> dict[str, Any]:
    if any(attention.qk_norm is not None for attention in attentions(cfg)):
        raise AttributeError("norms of queries and keys")
    return {**_write_shape(cfg), **write_rope(attentions(cfg)[0].rope)}


def _read_gemma3(json: ConfigJson) -> Decoder.Config:
    json.ignore("attn_logit_softcapping")  # same as transformers, which has no cap for this family
    cap = json.number("final_logit_softcapping", None, positive=True)
    period = json.count(json.either("sliding_window_pattern", "_sliding_window_pattern"), 6)
    far, local = _ropes(json)
    shape = _read_shape(json, (*[True] * (period - 1), False))
    return _finished(gemma3(far=far, local=local, logit_cap=cap, **shape), json)


def _ropes(json: ConfigJson) -> tuple[Rope.Config, Rope.Config]:
    """Return the rotary embeddings of layers without and with a window."""
    lengths = read_lengths(json)
    theta = json.number("rope_theta", 1e6, positive=True)
    local = json.number("rope_local_base_freq", 1e4, positive=True)
    both, old = json.nested("rope_parameters") or ConfigJson({}), json.nested("rope_scaling")
    far = [one for one in (old, both.nested("full_attention")) if one] or [ConfigJson({})]
    near = both.nested("sliding_attention") or ConfigJson({})
    if unread := both.unread():
        raise both.error(unread[0], "fields of full_attention and of sliding_attention", "a field of neither")
    found = [rope_of(one, theta, lengths) for one in far]
    if found[0] != found[-1]:
        raise json.error("rope_scaling", "the full_attention of rope_parameters, or one of the two", "another")
    return found[0], rope_of(near, local, lengths)


def _write_gemma3(cfg: Decoder.Config) -> dict[str, Any]:
    far, local = first_of(cfg, window=False).rope, first_of(cfg, window=True).rope
    if local.scaling is not None:
        raise AttributeError("a scaling where there is a window")
    kinds = {"full_attention": rope_parameters(far), "sliding_attention": rope_parameters(local)}
    old = write_rope(far)
    more = {"rope_local_base_freq": local.theta, "rope_parameters": kinds}
    return {**_write_shape(cfg), **old, **more}


ARCHITECTURES = (
    Architecture("Gemma2ForCausalLM", "gemma2", _read_gemma2, _write_gemma2, _ROWS),
    Architecture("Gemma3ForCausalLM", "gemma3_text", _read_gemma3, _write_gemma3, _ROWS),
)
