"""Gemma 2, and the text model of Gemma 3."""

from typing import Any

from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.block_pattern import first_block
from axlearn_like.layers.decoder import Decoder, SandwichBlock
from axlearn_like.layers.embedding import ScaledEmbedding
from models.gemma import gemma2, gemma3
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import ATTENTION, FEED_FORWARD, ROOT
from models.huggingface.families.patterns import attentions, first_of, read_kinds, segment_sections, write_kinds
from models.huggingface.rope import read_rope, rope_of, rope_parameters, write_rope
from models.huggingface.rows import Row, Section

_LAYER = "model.layers.{}"
_ROWS: dict[str, Row] = {
    **ATTENTION,
    **FEED_FORWARD,
    "attention_post_norm.scale": Row(f"{_LAYER}.post_attention_layernorm.weight", "d"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.pre_feedforward_layernorm.weight", "d"),
    "feed_forward_post_norm.scale": Row(f"{_LAYER}.post_feedforward_layernorm.weight", "d"),
}
_CAPS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}


def _sections(cfg: Decoder.Config) -> tuple[Section, ...]:
    return segment_sections(cfg, ROOT, _ROWS)


def _read_shape(json: ConfigJson, head_dim: int, kinds: tuple[bool, ...]) -> dict[str, Any]:
    json.only("hidden_activation" if "hidden_activation" in json else "hidden_act", "gelu_pytorch_tanh")
    json.ignore("hidden_act", "hidden_activation")
    json.only("attention_bias", False)
    json.only("use_bidirectional_attention", False)
    json.only("tie_word_embeddings", True)
    heads = json.integer("num_attention_heads")
    return {
        "vocab_size": json.integer("vocab_size"),
        "dim": json.integer("hidden_size"),
        "hidden": json.integer("intermediate_size"),
        "num_layers": json.count("num_hidden_layers"),
        "heads": (heads, json.integer("num_key_value_heads"), json.integer("head_dim", head_dim)),
        "scalar": json.number("query_pre_attn_scalar", 256.0, positive=True),
        "eps": json.number("rms_norm_eps", 1e-6, positive=True),
        "window": json.integer("sliding_window", 4096),
        "kinds": read_kinds(json, kinds),
    }


def _write_shape(cfg: Decoder.Config) -> dict[str, Any]:
    block: Any = first_block(cfg.block)
    if not (isinstance(block, SandwichBlock.Config) and isinstance(cfg.embedding, ScaledEmbedding.Config)):
        raise AttributeError("blocks of another kind")
    attention: Any = block.attention
    scalar = attention.scale**-2
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "intermediate_size": block.feed_forward.hidden,  # pyright: ignore[reportAttributeAccessIssue]
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": attention.head_dim or cfg.dim // attention.num_heads,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
        "rms_norm_eps": block.norm.eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": attention.rope.max_length or 8192,
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": cfg.embedding.logit_soft_cap,
        **write_kinds(cfg),
    }


def _read_gemma2(json: ConfigJson) -> Decoder.Config:
    # Absent, they have values in transformers; null means none.
    caps = {name: json.number(field, None, positive=True) for name, field in _CAPS.items()}
    json.ignore("cache_implementation", "sliding_window_size")
    return gemma2(rope=read_rope(json), **caps, **_read_shape(json, 256, (True, False)))


def _write_gemma2(cfg: Decoder.Config) -> dict[str, Any]:
    if any(attention.qk_norm is not None for attention in attentions(cfg)):
        raise AttributeError("norms of queries and keys")
    return {**_write_shape(cfg), **write_rope(attentions(cfg)[0].rope)}


def _read_gemma3(json: ConfigJson) -> Decoder.Config:
    caps = {name: json.number(field, None, positive=True) for name, field in _CAPS.items()}
    period = json.count("sliding_window_pattern", 6)
    far, local = _ropes(json)
    shape = _read_shape(json, 256, (*[True] * (period - 1), False))
    return gemma3(far=far, local=local, **caps, **shape)


def _ropes(json: ConfigJson) -> tuple[Rope.Config, Rope.Config]:
    """Return the rotary embeddings of layers without and with a window."""
    positions = json.integer("max_position_embeddings", None)
    far, local = json.number("rope_theta", 1e6, positive=True), json.number("rope_local_base_freq", 1e4, positive=True)
    both, old = json.nested("rope_parameters"), json.nested("rope_scaling")
    if both is None:
        wide = rope_of(old, far, positions) if old is not None else Rope.Config(theta=far, max_length=positions)
        return wide, Rope.Config(theta=local, max_length=positions)
    kinds = [(both.nested("full_attention"), far), (both.nested("sliding_attention"), local)]
    found = [
        Rope.Config(theta=theta, max_length=positions) if fields is None else rope_of(fields, theta, positions)
        for fields, theta in kinds
    ]
    return found[0], found[1]


def _write_gemma3(cfg: Decoder.Config) -> dict[str, Any]:
    far, local = first_of(cfg, window=False).rope, first_of(cfg, window=True).rope
    if local.scaling is not None:
        raise AttributeError("a scaling where there is a window")
    kinds = {"full_attention": rope_parameters(far), "sliding_attention": rope_parameters(local)}
    old = write_rope(far)
    more = {"rope_local_base_freq": local.theta, "rope_parameters": kinds}
    return {**_write_shape(cfg), **old, **more}


ARCHITECTURES = (
    Architecture("Gemma2ForCausalLM", "gemma2", _read_gemma2, _write_gemma2, _sections),
    Architecture("Gemma3ForCausalLM", "gemma3_text", _read_gemma3, _write_gemma3, _sections),
)
