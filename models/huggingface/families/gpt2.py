"""GPT-2, whose matrices are stored [in, out], with queries, keys and values in one."""

from typing import Any

from axlearn_like.layers.block_pattern import first_block
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.embedding import Head, PositionedEmbedding
from axlearn_like.layers.feed_forward import FeedForward
from models.gpt2 import layer_norm_decoder
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import ACTIVATIONS
from models.huggingface.families.patterns import attentions, in_turn
from models.huggingface.rows import Row

_LAYER = "transformer.h.{}"
_ROOT: dict[str, Row] = {
    "embedding.weight_vd": Row("transformer.wte.weight", "v,d"),
    "embedding.positions_vd": Row("transformer.wpe.weight", "v,d"),
    "norm.scale": Row("transformer.ln_f.weight", "d"),
    "norm.bias": Row("transformer.ln_f.bias", "d"),
    "head.weight_dv": Row("lm_head.weight", "v,d"),
}
_ROWS: dict[str, Row] = {
    "attention_norm.scale": Row(f"{_LAYER}.ln_1.weight", "d"),
    "attention_norm.bias": Row(f"{_LAYER}.ln_1.bias", "d"),
    "attention.q_dkqh": Row(f"{_LAYER}.attn.c_attn.weight", "d,[kqh]"),
    "attention.k_dkh": Row(f"{_LAYER}.attn.c_attn.weight", "d,[kh]", part=1),
    "attention.v_dkh": Row(f"{_LAYER}.attn.c_attn.weight", "d,[kh]", part=2),
    "attention.q_bias_kqh": Row(f"{_LAYER}.attn.c_attn.bias", "[kqh]"),
    "attention.k_bias_kh": Row(f"{_LAYER}.attn.c_attn.bias", "[kh]", part=1),
    "attention.v_bias_kh": Row(f"{_LAYER}.attn.c_attn.bias", "[kh]", part=2),
    "attention.out_kqhd": Row(f"{_LAYER}.attn.c_proj.weight", "kqh,d"),
    "attention.out_bias_d": Row(f"{_LAYER}.attn.c_proj.bias", "d"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.ln_2.weight", "d"),
    "feed_forward_norm.bias": Row(f"{_LAYER}.ln_2.bias", "d"),
    "feed_forward.up_df": Row(f"{_LAYER}.mlp.c_fc.weight", "d,f"),
    "feed_forward.up_bias_f": Row(f"{_LAYER}.mlp.c_fc.bias", "f"),
    "feed_forward.down_fd": Row(f"{_LAYER}.mlp.c_proj.weight", "f,d"),
    "feed_forward.down_bias_d": Row(f"{_LAYER}.mlp.c_proj.bias", "d"),
}


def _read(json: ConfigJson) -> Decoder.Config:
    json.only("add_cross_attention", False)
    # Fields of other heads and of dropout; `n_ctx` is `n_positions` again.
    json.ignore("n_ctx", "attn_pdrop", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout")
    json.ignore("summary_proj_to_labels", "summary_type", "summary_use_proj")
    dim, heads = json.integer("n_embd"), json.integer("n_head")
    cfg = layer_norm_decoder(
        vocab_size=json.integer("vocab_size"),
        max_length=json.integer("n_positions"),
        dim=dim,
        num_layers=json.layers("n_layer"),
        num_heads=heads,
        hidden=json.integer("n_inner", 4 * dim),
        eps=json.number("layer_norm_epsilon", positive=True),
    )
    block: Any = cfg.block
    block.feed_forward.set(activation=json.choice("activation_function", ACTIVATIONS))
    scale = (dim // heads) ** -0.5 if json.flag("scale_attn_weights") else 1.0
    if json.flag("scale_attn_by_inverse_layer_idx"):
        scales = [scale / (1 + index) for index in range(cfg.num_layers)]
        cfg.block = in_turn([block.clone(attention=block.attention.clone(scale=one)) for one in scales])
    elif scale == 1.0:
        block.attention.set(scale=1.0)
    return cfg if json.flag("tie_word_embeddings") else cfg.set(head=Head.Config())


def _write(cfg: Decoder.Config) -> dict[str, Any]:
    block: Any = first_block(cfg.block)
    if not (
        isinstance(block.feed_forward, FeedForward.Config) and isinstance(cfg.embedding, PositionedEmbedding.Config)
    ):
        raise AttributeError("layers of another kind")
    names = {value: name for name, value in reversed(ACTIVATIONS.items()) if name != "gelu_pytorch_tanh"}
    return {
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.embedding.max_length,
        "n_embd": cfg.dim,
        "n_layer": cfg.num_layers,
        "n_head": block.attention.num_heads,
        "n_inner": block.feed_forward.hidden,
        "activation_function": names[block.feed_forward.activation],
        "layer_norm_epsilon": block.norm.eps,
        "scale_attn_weights": attentions(cfg)[0].scale != 1.0,
        "scale_attn_by_inverse_layer_idx": len({one.scale for one in attentions(cfg)}) > 1,
        "tie_word_embeddings": cfg.head is None,
        # transformers would have token 50,256 end a text, whatever the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        _read,
        _write,
        _ROWS,
        _ROOT,
        copies={"lm_head.weight": "transformer.wte.weight"},
        vocabulary=("transformer.wte.weight", "lm_head.weight"),
        base_prefix="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # masks
    ),
)
