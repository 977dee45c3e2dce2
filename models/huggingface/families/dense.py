"""Llama, Mistral, Qwen 2 and Qwen 3: pre-norm blocks of grouped-query attention and SwiGLU."""

from functools import partial
from typing import Any

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from models.dense import dense
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.rope import read_rope, write_rope
from models.huggingface.rows import Row, Section

_LAYER = "model.layers.{}"

ROOT: dict[str, Row] = {
    "embedding.weight_vd": Row("model.embed_tokens.weight", "v,d"),
    "norm.scale": Row("model.norm.weight", "d"),
    "head.weight_dv": Row("lm_head.weight", "v,d"),
}
ATTENTION: dict[str, Row] = {
    "attention_norm.scale": Row(f"{_LAYER}.input_layernorm.weight", "d"),
    "attention.q_dkqh": Row(f"{_LAYER}.self_attn.q_proj.weight", "kqh,d"),
    "attention.k_dkh": Row(f"{_LAYER}.self_attn.k_proj.weight", "kh,d"),
    "attention.v_dkh": Row(f"{_LAYER}.self_attn.v_proj.weight", "kh,d"),
    "attention.q_bias_kqh": Row(f"{_LAYER}.self_attn.q_proj.bias", "kqh"),
    "attention.k_bias_kh": Row(f"{_LAYER}.self_attn.k_proj.bias", "kh"),
    "attention.v_bias_kh": Row(f"{_LAYER}.self_attn.v_proj.bias", "kh"),
    "attention.q_norm.scale": Row(f"{_LAYER}.self_attn.q_norm.weight", "d"),
    "attention.k_norm.scale": Row(f"{_LAYER}.self_attn.k_norm.weight", "d"),
    "attention.out_kqhd": Row(f"{_LAYER}.self_attn.o_proj.weight", "d,kqh"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.post_attention_layernorm.weight", "d"),
}
FEED_FORWARD: dict[str, Row] = {
    "feed_forward.gate_df": Row(f"{_LAYER}.mlp.gate_proj.weight", "f,d"),
    "feed_forward.up_df": Row(f"{_LAYER}.mlp.up_proj.weight", "f,d"),
    "feed_forward.down_fd": Row(f"{_LAYER}.mlp.down_proj.weight", "d,f"),
}


def sections(cfg: Decoder.Config, feed_forward: dict[str, Row] = FEED_FORWARD) -> tuple[Section, ...]:
    """Return the tables of a decoder whose blocks are all alike."""
    return Section("", ROOT), Section("layers.", {**ATTENTION, **feed_forward}, tuple(range(cfg.num_layers)))


def read_shape(json: ConfigJson, **more: Any) -> dict[str, Any]:
    """Return the arguments of `dense`, without `hidden`, that all these families spell alike."""
    json.only("attention_bias", False)
    heads, dim = json.integer("num_attention_heads"), json.integer("hidden_size")
    each = json.integer("num_key_value_heads", heads)
    if each < 1 or heads % each:
        raise json.error("num_attention_heads", f"a multiple of num_key_value_heads={each}", str(heads))
    return {
        "vocab_size": json.integer("vocab_size"),
        "dim": dim,
        "num_layers": json.count("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": each,
        "head_dim": json.integer("head_dim", dim // heads),
        "tied": json.flag("tie_word_embeddings", False),
        "eps": json.number("rms_norm_eps", 1e-6, positive=True),
        "theta": 0.0,  # the whole embedding is set by `with_rope`
        **more,
    }


def with_rope(cfg: Decoder.Config, json: ConfigJson, theta: float = 10_000.0) -> Decoder.Config:
    """Set the rotary embedding of all blocks; `theta`: the architecture's default."""
    parts(cfg)[1].rope = read_rope(json, theta)
    return cfg


def parts(cfg: Decoder.Config) -> tuple[Block.Config, Attention.Config, Rope.Config]:
    """Return the block, its attention and its rotary embedding. AttributeError: the blocks are of another kind."""
    block: Any = cfg.block
    attention, rope = block.attention, block.attention.rope
    if not (
        isinstance(block, Block.Config) and isinstance(attention, Attention.Config) and isinstance(rope, Rope.Config)
    ):
        raise AttributeError("blocks of another kind")
    return block, attention, rope


def write_shape(cfg: Decoder.Config, **more: Any) -> dict[str, Any]:
    """Return the fields that all these families spell alike."""
    block, attention, rope = parts(cfg)
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": attention.head_dim or cfg.dim // attention.num_heads,
        "tie_word_embeddings": cfg.head is None,
        "rms_norm_eps": block.norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": rope.max_length or 32_768,
        **write_rope(rope),
        **more,
    }


def _hidden(cfg: Decoder.Config) -> int:
    feed_forward: Any = cfg.block.feed_forward  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(feed_forward, SwiGLU.Config):
        raise AttributeError("a feed-forward layer of another kind")
    return feed_forward.hidden


def _read(json: ConfigJson, **more: Any) -> Decoder.Config:
    json.only("hidden_act", "silu", "swish")
    json.only("mlp_bias", False)
    return with_rope(dense(hidden=json.integer("intermediate_size"), **read_shape(json, **more)), json)


def _write(cfg: Decoder.Config, **more: Any) -> dict[str, Any]:
    return write_shape(cfg, intermediate_size=_hidden(cfg), **more)


def _read_mistral(json: ConfigJson) -> Decoder.Config:
    cfg = _read(json)
    parts(cfg)[1].window = json.integer("sliding_window", None)
    return cfg


def _read_qwen(json: ConfigJson, **more: Any) -> Decoder.Config:
    json.only("use_sliding_window", False)
    json.only("use_mrope", False)
    json.ignore("sliding_window", "max_window_layers")  # they count with `use_sliding_window` alone
    cfg, kinds = _read(json, **more), json.texts("layer_types")
    if set(kinds) - {"full_attention"} or len(kinds) not in (0, cfg.num_layers):
        found = f"{len(kinds)} of {', '.join(sorted(set(kinds)))}"
        raise json.error("layer_types", f"{cfg.num_layers} times full_attention", found)
    return cfg


ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM", "llama", _read, lambda cfg: _write(cfg, mlp_bias=False, pretraining_tp=1), sections
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        partial(_read_qwen, qkv_bias=True),
        lambda cfg: _write(cfg, use_sliding_window=False),
        sections,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        partial(_read_qwen, qk_norm=True),
        lambda cfg: _write(cfg, use_sliding_window=False),
        sections,
    ),
    Architecture(
        "MistralForCausalLM",
        "mistral",
        _read_mistral,
        lambda cfg: _write(cfg, sliding_window=parts(cfg)[1].window),
        sections,
    ),
)
