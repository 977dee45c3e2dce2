"""`config.json` to a decoder and back, and what is refused."""

import pytest

from axlearn_like.config import to_text
from axlearn_like.layers.attention.rope import Llama3Scaling
from axlearn_like.layers.embedding import Float32Embedding, Float32Head
from axlearn_like.layers.norm import RMSNorm
from models.catalog import published_model
from models.huggingface.architectures import ARCHITECTURES, architecture_for, config_json, read_decoder
from models.huggingface.config_json import ConfigJson, ConfigJsonError
from models.huggingface.rows import ConversionError
from models.llama import llama
from models.moe import moe
from models.qwen import qwen
from models.tiny import tiny

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
}

PUBLISHED = {
    "Llama-3.1-8B": ("LlamaForCausalLM", llama),
    "Llama-2-70B": ("LlamaForCausalLM", llama),
    "Qwen2.5-0.5B": ("Qwen2ForCausalLM", qwen),
    "Qwen3-0.6B": ("Qwen3ForCausalLM", qwen),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", moe),
    "Mixtral-8x7B": ("MixtralForCausalLM", moe),
    "Mistral-7B-v0.1": ("MistralForCausalLM", published_model),
    "Gemma-2-27B": ("Gemma2ForCausalLM", published_model),
    "Gemma-3-1B": ("Gemma3ForCausalLM", published_model),
    "Gemma-3-4B": ("Gemma3ForCausalLM", published_model),
    "gpt-oss-20b": ("GptOssForCausalLM", published_model),
    "GPT-2-124M": ("GPT2LMHeadModel", published_model),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", published_model),
}


def test_the_published_fields_of_llama_are_the_config_here():
    architecture, cfg = read_decoder(ConfigJson(LLAMA))
    assert architecture.name == "LlamaForCausalLM"
    assert to_text(cfg) == to_text(llama("Llama-3.1-8B"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_architecture_and_comes_back(name):
    wanted, make = PUBLISHED[name]
    fields = config_json(make(name), "bfloat16")
    assert fields["architectures"] == [wanted] and fields["model_type"] == ARCHITECTURES[wanted].model_type
    json = ConfigJson(fields)
    _, back = read_decoder(json)
    assert not json.unread()
    assert config_json(back, "bfloat16") == fields
    assert architecture_for(back).name == wanted


def test_the_form_of_transformers_5_says_the_same():
    scaling = LLAMA["rope_scaling"]
    assert isinstance(scaling, dict)
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": {**scaling, "rope_theta": 500_000.0}, "dtype": "bfloat16"}
    assert read_decoder(ConfigJson(new))[1] == read_decoder(ConfigJson(LLAMA))[1]


def test_the_window_of_mistral_is_that_of_the_attention():
    fields = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    _, cfg = read_decoder(ConfigJson(fields))
    assert cfg.block.attention.window == 4096  # pyright: ignore
    assert architecture_for(cfg).name == "MistralForCausalLM"
    assert config_json(cfg)["sliding_window"] == 4096


REFUSED = {
    "unknown architecture": (
        {"architectures": ["LlamaForCausalLMM"]},
        r"config\.json: architectures: unknown architecture 'LlamaForCausalLMM'; did you mean 'LlamaForCausalLM'",
    ),
    "none": ({"architectures": None, "model_type": "blama"}, r"model_type: expected .* did you mean 'llama'"),
    "two families": ({"model_type": "qwen2"}, r"model_type: expected 'llama', got 'qwen2'"),
    "rope type": (
        {"rope_scaling": {"rope_type": "llama4", "factor": 2.0}},
        r"rope_scaling: rope_type: expected 'default' or .*'llama4', which none of our layers computes",
    ),
    "field of a rope type": (
        {"rope_scaling": {**LLAMA["rope_scaling"], "short_factor": [1.0]}},  # pyright: ignore
        r"rope_scaling: short_factor: expected no such field for this rope type",
    ),
    "activation": ({"hidden_act": "relu2"}, r"hidden_act: expected 'silu' or 'swish' or .*, got 'relu2'"),
    "part of a head": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1, .*, got 0\.5"),
    "two answers": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        r"rope_scaling: expected the rotary embedding of rope_parameters, or one of the two, got another",
    ),
    "missing": ({"hidden_size": None}, r"config\.json: hidden_size: expected an integer, got nothing"),
    "type": ({"hidden_size": "4096"}, r"hidden_size: expected an integer, got '4096'"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype: expected 'float32' or"),
    "heads": ({"num_key_value_heads": 5}, r"num_attention_heads: expected a multiple of num_key_value_heads=5, got 32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_layer_computes_is_refused_by_name(case):
    change, message = REFUSED[case]
    with pytest.raises(ConfigJsonError, match=message):
        read_decoder(ConfigJson({**LLAMA, **change}))


def test_a_field_that_nobody_reads_is_listed():
    json = ConfigJson({**LLAMA, "logit_multiplier": 2.0, "use_cache": True, "unused": None})
    read_decoder(json)
    assert json.unread() == ["logit_multiplier"]


def test_a_decoder_that_no_architecture_has_is_refused_with_what_differs():
    cfg = tiny(vocab_size=8)
    cfg.block.attention.set(soft_cap=30.0)  # pyright: ignore
    with pytest.raises(ConversionError, match=r"Qwen3ForCausalLM has not block\.attention\.soft_cap=30\.0"):
        architecture_for(cfg)
    assert architecture_for(tiny(vocab_size=8)).name == "Qwen3ForCausalLM"


def test_what_changes_no_function_does_not_matter():
    cfg = llama("Llama-3.1-8B").set(remat="everything", scan_unroll=2, dtype="float32")
    assert architecture_for(cfg).name == "LlamaForCausalLM"
    fields = config_json(cfg)
    assert config_json(cfg.set(head=Float32Head.Config())) == fields
    tied = tiny(vocab_size=8).set(embedding=Float32Embedding.Config())
    assert architecture_for(tied).name == "Qwen3ForCausalLM"
    cfg.set(norm=RMSNorm.Config(eps=1e-3))
    with pytest.raises(ConversionError, match=r"has not norm\.eps"):
        architecture_for(cfg)


def test_another_scaling_is_another_function():
    cfg = llama("Llama-3.1-8B")
    assert isinstance(cfg.block.attention.rope.scaling, Llama3Scaling.Config)  # pyright: ignore
    assert config_json(cfg)["rope_parameters"]["rope_type"] == "llama3"
    assert config_json(llama("Llama-3-8B"))["rope_scaling"] is None


def test_a_small_gpt_2_does_not_end_on_the_token_that_transformers_would_take():
    cfg = published_model("GPT-2-124M").set(vocab_size=96)
    fields = config_json(cfg, eos_token_id=1)
    assert fields["bos_token_id"] is None and fields["eos_token_id"] == 1  # the default of both is 50,256
    assert config_json(cfg)["eos_token_id"] is None and read_decoder(ConfigJson(fields))[1].vocab_size == 96
