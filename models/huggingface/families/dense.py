"""Llama, Mistral, Qwen 2 and Qwen 3: pre-norm blocks of grouped-query attention and SwiGLU."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from axlearn_like.config import config_items
from axlearn_like.layers.attention.grouped_query import Attention, BiasedAttention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.block_pattern import first_block
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import GLU, Activation, BiasedGLU, SwiGLU
from models.dense import dense
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.patterns import in_turn, read_windows, write_windows
from models.huggingface.rope import read_rope, write_rope
from models.huggingface.rows import Row

_LAYER = "model.layers.{}"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
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
    "attention.out_bias_d": Row(f"{_LAYER}.self_attn.o_proj.bias", "d"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.post_attention_layernorm.weight", "d"),
}
FEED_FORWARD: dict[str, Row] = {
    "feed_forward.gate_df": Row(f"{_LAYER}.mlp.gate_proj.weight", "f,d"),
    "feed_forward.up_df": Row(f"{_LAYER}.mlp.up_proj.weight", "f,d"),
    "feed_forward.down_fd": Row(f"{_LAYER}.mlp.down_proj.weight", "d,f"),
    "feed_forward.gate_bias_f": Row(f"{_LAYER}.mlp.gate_proj.bias", "f"),
    "feed_forward.up_bias_f": Row(f"{_LAYER}.mlp.up_proj.bias", "f"),
    "feed_forward.down_bias_d": Row(f"{_LAYER}.mlp.down_proj.bias", "d"),
}


def read_sizes(json: ConfigJson) -> dict[str, Any]:
    """Return the sizes of a decoder that every family spells alike."""
    return {
        "vocab_size": json.integer("vocab_size"),
        "dim": json.integer("hidden_size"),
        "num_layers": json.layers("num_hidden_layers"),
        "eps": json.number("rms_norm_eps", positive=True),
    }


def write_sizes(cfg: Decoder.Config, max_length: int) -> dict[str, Any]:
    """Return the fields of a decoder of grouped-query attention that every family spells alike.

    `max_length`: positions where the decoder does not say how many.
    """
    block: Any = first_block(cfg.block)
    attention: Any = block.attention
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": attention.head_dim or cfg.dim // attention.num_heads,
        "tie_word_embeddings": cfg.head is None,
        "rms_norm_eps": block.norm.eps,
        "attention_bias": isinstance(attention, BiasedAttention.Config),
        "max_position_embeddings": attention.rope.max_length or max_length,
    }


def read_shape(json: ConfigJson, **more: Any) -> dict[str, Any]:
    """Return the arguments of `dense`, without `hidden`, that all these families spell alike."""
    heads, dim = json.integer("num_attention_heads"), json.integer("hidden_size")
    each = json.integer("num_key_value_heads", heads)
    if each < 1 or heads % each:
        raise json.error("num_attention_heads", f"a multiple of num_key_value_heads={each}", str(heads))
    return {
        **read_sizes(json),
        "num_heads": heads,
        "num_kv_heads": each,
        "head_dim": json.count("head_dim", dim // heads),
        "tied": json.flag("tie_word_embeddings"),
        "theta": 0.0,  # the whole embedding is set by `with_attention`
        **more,
    }


def with_attention(cfg: Decoder.Config, json: ConfigJson, windows: Sequence[int | None] = (None,)) -> Decoder.Config:
    """Complete the attention of the blocks: its rotary embedding, biases, and windows, of each block in turn.

    Args:
        cfg: a decoder of alike blocks.
        windows: that of each layer, or one for all of them.
    """
    block, attention, _ = parts(cfg)
    attention.rope = read_rope(json)
    block.attention = with_biases(attention, json)
    blocks = [block.clone() for _ in windows]
    for one, window in zip(blocks, windows, strict=True):
        one.attention.set(window=window)
    cfg.block = in_turn(blocks)
    return cfg


def with_biases(attention: Attention.Config, json: ConfigJson) -> Attention.Config:
    """Return the attention with biases on all four projections, if the file says so and transformers looks there."""
    if "attention_bias" not in json.defaults:
        json.only("attention_bias", False)
        return attention
    if not json.flag("attention_bias"):
        return attention
    return BiasedAttention.Config(**{**dict(config_items(attention)), "qkv_bias": True})


def parts(cfg: Decoder.Config) -> tuple[Block.Config, Attention.Config, Rope.Config]:
    """Return the block, its attention and its rotary embedding; of a pattern the first repeated block's.

    Raises:
        AttributeError: the blocks are of another kind.
    """
    block: Any = first_block(cfg.block)
    attention, rope = block.attention, block.attention.rope
    if not (
        isinstance(block, Block.Config) and isinstance(attention, Attention.Config) and isinstance(rope, Rope.Config)
    ):
        raise AttributeError("blocks of another kind")
    return block, attention, rope


def write_shape(cfg: Decoder.Config, **more: Any) -> dict[str, Any]:
    """Return the fields that all these families spell alike."""
    _, _, rope = parts(cfg)
    return {**write_sizes(cfg, 32_768), "hidden_act": "silu", **write_rope(rope), **more}


def _read(json: ConfigJson, windows: Sequence[int | None] = (None,), **more: Any) -> Decoder.Config:
    cfg = dense(hidden=json.integer("intermediate_size"), **read_shape(json, **more))
    parts(cfg)[0].feed_forward = _read_feed_forward(json)
    return with_attention(cfg, json, windows)


def _read_feed_forward(json: ConfigJson) -> SwiGLU.Config:
    hidden, activation = json.integer("intermediate_size"), json.choice("hidden_act", ACTIVATIONS)
    if json.flag("mlp_bias", False):
        if "mlp_bias" not in json.defaults:
            raise json.error("mlp_bias", "false, or no such field in this architecture", "true")
        return BiasedGLU.Config(hidden=hidden, activation=activation)
    return SwiGLU.Config(hidden=hidden) if activation == "silu" else GLU.Config(hidden=hidden, activation=activation)


def _write(cfg: Decoder.Config, **more: Any) -> dict[str, Any]:
    layer: Any = parts(cfg)[0].feed_forward
    if not isinstance(layer, SwiGLU.Config):
        raise AttributeError("a feed-forward layer of another kind")
    activation = layer.activation if isinstance(layer, GLU.Config) else "silu"
    names = {value: name for name, value in reversed(ACTIVATIONS.items())}
    fields = {"intermediate_size": layer.hidden, "hidden_act": names[activation], **more}
    return write_shape(cfg, **fields)


def _write_llama(cfg: Decoder.Config) -> dict[str, Any]:
    layer: Any = parts(cfg)[0].feed_forward
    return _write(cfg, mlp_bias=isinstance(layer, BiasedGLU.Config), pretraining_tp=1)


def _read_mistral(json: ConfigJson) -> Decoder.Config:
    return _read(json, (json.integer("sliding_window", None),))


def _read_qwen(json: ConfigJson, **more: Any) -> Decoder.Config:
    json.only("use_mrope", False)
    return _read(json, read_windows(json), **more)


def _write_qwen(cfg: Decoder.Config) -> dict[str, Any]:
    return _write(cfg, **write_windows(cfg))


_ROWS = {**ATTENTION, **FEED_FORWARD}
ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", _read, _write_llama, _ROWS),
    Architecture("Qwen2ForCausalLM", "qwen2", partial(_read_qwen, qkv_bias=True), _write_qwen, _ROWS),
    Architecture("Qwen3ForCausalLM", "qwen3", partial(_read_qwen, qk_norm=True), _write_qwen, _ROWS),
    Architecture(
        "MistralForCausalLM",
        "mistral",
        _read_mistral,
        lambda cfg: _write(cfg, sliding_window=parts(cfg)[1].window),
        _ROWS,
    ),
)
