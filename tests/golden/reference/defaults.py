r"""The meaning of config.json to Hugging Face transformers: fields that it leaves out, and those that change a model.

Run as decoders.py is, beside which it stands:

    golden/bin/python tests/golden/reference/defaults.py models/huggingface/defaults.json \
        tests/models/golden/config_json.json

The first file is the table that importing uses: model type -> field -> default of transformers' own config class. The
second is for the tests: for each model type a small `config.json` in which every field counts, and

* `without`: what transformers holds after reading it without a field, with null in its place, or in the form of
  transformers 4 (`rope_theta`, `rope_scaling`): every field that differs from what it holds otherwise;
* `changed`: a field, another value, and whether the logits of a random model, or its parameters, are then others;
* `ropes`: rotary embeddings as fields of a Llama, and the frequencies and the factor that transformers makes of them.
"""

# pyright: reportMissingImports=false

import argparse
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SLIDING, FULL = "sliding_attention", "full_attention"
# Fields that say nothing about what is computed without dropout, one forward pass at a time.
OTHERS = frozenset(
    """use_cache pad_token_id bos_token_id eos_token_id attention_dropout initializer_range pretraining_tp
    output_router_logits resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout""".split()
)
COMMON = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
}
QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 7,
    "sliding_window": 5,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}
BOTH = {
    FULL: {"rope_type": "linear", "rope_theta": 70.0, "factor": 2.0},
    SLIDING: {"rope_type": "default", "rope_theta": 30.0},
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "router_aux_loss_coef": 0.01}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
# Model type -> (class of the model, fields of its config.json).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**COMMON, "mlp_bias": False}),
    "mistral": ("MistralForCausalLM", {**COMMON, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {**COMMON, **QWEN}),
    "qwen3": ("Qwen3ForCausalLM", {**COMMON, **QWEN}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **COMMON,
            **MIXTURE,
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_experts": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {**COMMON, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**COMMON, **GEMMA}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            **COMMON,
            **GEMMA,
            "attn_logit_softcapping": None,
            "sliding_window_pattern": 2,
            "rope_parameters": BOTH,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **COMMON,
            "attention_bias": True,
            "sliding_window": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "router_aux_loss_coef": 0.01,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 48,
            "n_positions": 64,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 20,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-3,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **{key: value for key, value in COMMON.items() if key != "head_dim"},
            **MIXTURE,
            **LATENT,
            **GROUPS,
            "num_key_value_heads": 4,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "rope_interleave": True,
            "num_nextn_predict_layers": 1,
        },
    ),
}
OTHER_TEXT = {"hidden_act": "gelu", "hidden_activation": "gelu", "activation_function": "relu"}
# Fields whose other value a rule does not find.
OTHER: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 48,
    "head_dim": 6,
    "n_embd": 48,
    "n_head": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 16,
    "num_local_experts": 6,
    "num_experts": 6,
    "max_window_layers": 2,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
    "sliding_window_pattern": 3,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0},
    "qk_rope_head_dim": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 2,
    "attn_logit_softcapping": 3.0,
}
# Beside those that a class has: fields of older files, or of other families.
MORE = {
    "rope_theta": 80.0,
    "rope_scaling": {"type": "linear", "factor": 3.0},
    "partial_rotary_factor": 0.5,
    "layer_types": [FULL, SLIDING, SLIDING],
    "attention_bias": True,
    "mlp_bias": True,
    "use_bidirectional_attention": True,
    "hidden_act": "gelu",
    "num_experts_per_tok": 1,
    "sliding_window": 3,
    "norm_topk_prob": False,
    "rope_local_base_freq": 40.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "moe_layer_freq": 2,
    "logit_scale": 2.0,
    "embedding_multiplier": 2.0,
    "qk_layernorm": True,
}


def config_class(name: str) -> Any:
    """The config class of a model's class."""
    return getattr(transformers, name).config_class


def field_defaults(name: str) -> dict[str, Any]:
    """Defaults of the fields that a class adds to those of all configs, as a config.json would have them."""
    kind = config_class(name)
    generic = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)} - {"tie_word_embeddings"}
    found = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.name not in generic | OTHERS and field.default is not dataclasses.MISSING
    }
    if "rope_parameters" in found:
        found["rope_parameters"] = kind().rope_parameters
    return dict(sorted(found.items()))


def held(name: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """The fields that transformers holds after reading these, without those of no meaning here; None: it refuses."""
    try:
        kind = config_class(name)
        config = kind.from_dict({**copy.deepcopy(fields), "architectures": [name]})
        found = config.to_dict()
    except Exception:  # of many kinds
        return None
    generic = transformers.PreTrainedConfig().to_dict()
    without = {*generic, *OTHERS, "transformers_version", "model_type"} - {"tie_word_embeddings", "add_cross_attention"}
    return {key: value for key, value in found.items() if key not in without}


def older(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The fields in the form of transformers 4; None: they have no rotary embedding."""
    fields = copy.deepcopy(fields)
    rope = fields.pop("rope_parameters", None)
    if rope is None:
        return None
    far = rope.get(FULL, rope)
    # A Gemma 3 with "type" is read by transformers 5 as one without scaling.
    name = "rope_type" if FULL in rope else "type"
    fields |= {"rope_theta": far.pop("rope_theta"), "rope_scaling": {name: far.pop("rope_type"), **far}}
    return fields | ({"rope_local_base_freq": rope[SLIDING]["rope_theta"]} if SLIDING in rope else {})


def without_fields(name: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Files that lack a field, or have null there, and what differs then from what transformers holds of all."""
    whole, found = held(name, fields), []
    assert whole is not None, name
    for form, base in {"new": fields, "old": older(fields)}.items():
        for key in base or ():
            for null in (False, True):
                changed = {**base, key: None} if null else {k: v for k, v in base.items() if k != key}
                now = held(name, changed)
                if now is not None:
                    differing = {k: v for k, v in now.items() if k not in whole or whole[k] != v}
                    lacks = sorted(whole.keys() - now.keys())
                    found.append({"form": form, "field": key, "null": null, "differs": differing, "lacks": lacks})
    return found


def other_value(key: str, value: Any) -> Any:
    """Another value of a field."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return OTHER_TEXT[key]
    return value + 4 if isinstance(value, int) else 2 * value


def logits(name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Shapes of the parameters and logits of a model whose parameters are the same for the same shapes."""
    config = config_class(name).from_dict(copy.deepcopy(fields))
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
        tokens = torch.randint(0, 48, (1, 24), generator=torch.Generator().manual_seed(1))
        found = model(tokens, use_cache=False).logits
    return {key: list(weight.shape) for key, weight in model.named_parameters()}, found


def changed_fields(name: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Other values of fields, and whether they change the parameters or the logits; None: transformers fails."""
    shapes, expected = logits(name, fields)
    found = []
    both = {"rope_parameters": {**BOTH, FULL: OTHER["rope_parameters"]}} if name == "Gemma3ForCausalLM" else {}
    values = {key: other_value(key, value) for key, value in fields.items()} | both
    values |= {key: value for key, value in MORE.items() if key not in fields}
    values = values if "num_hidden_layers" in fields else without(values, "layer_types")
    for key, value in values.items():
        try:
            others, now = logits(name, {**fields, key: value})
            effect: bool | None = others != shapes or bool((now - expected).abs().max() > 1e-5 * expected.std())
        except Exception as error:  # of many kinds
            print(name, key, value, "fails:", str(error).strip().splitlines()[-1][:100])
            effect = None
        found.append({"field": key, "value": value, "effect": effect})
    return found


LENGTHS = {"max_position_embeddings": 64, "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
HALF = [1.0 + 0.25 * i for i in range(8)]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": HALF,
    "long_factor": [2 * f for f in HALF],
    "original_max_position_embeddings": 16,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1000.0}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields but these."""
    return {key: value for key, value in fields.items() if key not in names}


ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 300.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 70.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 70.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 70.0},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": YARN},
    {"rope_scaling": without(YARN, "rope_theta"), "rope_theta": 1000.0},
    {"rope_parameters": {**YARN, "factor": None}},
    {"rope_parameters": without(YARN, "original_max_position_embeddings")},
    {"rope_parameters": {**YARN, "attention_factor": 1.25}},
    {"rope_parameters": {**YARN, "attention_factor": 0.0}},
    {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_parameters": {**YARN, "mscale": 0.7}},
    {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}},
    {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2}},
    {"rope_parameters": {**YARN, "beta_fast": 0, "beta_slow": None}},
    {"rope_parameters": {**YARN, "truncate": False}},
    {"rope_parameters": {**YARN, "factor": 0.5}},
    {"rope_parameters": YARN, "original_max_position_embeddings": 32},
    {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": LLAMA3, "original_max_position_embeddings": 8},
    {"rope_parameters": LONG},
    {"rope_parameters": {**LONG, "factor": 8.0}},
    {"rope_parameters": {**LONG, "attention_factor": 1.5}},
    {"rope_parameters": without(LONG, "original_max_position_embeddings")},
    {"rope_scaling": {**without(LONG, "rope_theta", "rope_type"), "type": "longrope"}, "rope_theta": 1000.0},
    {"rope_parameters": LONG, "original_max_position_embeddings": 32},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    # Two answers: transformers takes the older field.
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
]


def rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Frequencies of short and of long sequences, and the factor of cosines and sines; `None`: transformers fails."""
    try:
        config: Any = transformers.LlamaConfig.from_dict({**copy.deepcopy(fields), **LENGTHS})
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            made = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            frequencies, factor = made.inv_freq, made.attention_scaling
            return {"fields": fields, "frequencies": frequencies.tolist(), "factor": factor}
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        found = {"fields": fields, "frequencies": frequencies.tolist(), "factor": factor}
        if kind == "longrope":
            found["long"] = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=1000)[0].tolist()
        return found
    except Exception as error:
        print("rope", fields, "fails:", str(error).strip().splitlines()[-1][:100])
        return {"fields": fields, "frequencies": None}


def text_of(found: Any, depth: int) -> str:
    """JSON with a line for each entry of what is nested less than `depth` deep."""
    if depth == 0 or not isinstance(found, dict | list) or not found:
        return json.dumps(found)
    if isinstance(found, list):
        return "[\n" + ",\n".join(text_of(one, depth - 1) for one in found) + "\n]"
    entries = (f"{json.dumps(key)}: {text_of(value, depth - 1)}" for key, value in found.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def write(path: Path, found: Any, depth: int) -> None:
    """Write a file."""
    path.write_text(text_of(found, depth) + "\n")
    print(path, path.stat().st_size)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("defaults", type=Path)
    parser.add_argument("golden", type=Path)
    arguments = parser.parse_args()
    write(arguments.defaults, {kind: field_defaults(name) for kind, (name, _) in MODELS.items()}, 2)
    models = {
        kind: {
            "architecture": name,
            "fields": fields,
            "held": held(name, fields),
            "without": without_fields(name, fields),
            "changed": changed_fields(name, fields),
        }
        for kind, (name, fields) in MODELS.items()
    }
    golden = {"transformers": transformers.__version__, "models": models, "ropes": [rope(one) for one in ROPES]}
    write(arguments.golden, golden, 4)


if __name__ == "__main__":
    main()
