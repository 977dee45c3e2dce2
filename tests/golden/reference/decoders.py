"""Tiny random decoders by Hugging Face transformers: weights and logits for tests/models/huggingface/test_convert.py.

Not run by the tests and not by the project's environment; any Python >= 3.10 with torch and transformers >= 5 will do:

    python -m venv golden && golden/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    golden/bin/python tests/golden/reference/decoders.py tests/models/golden

Each file holds `config` (JSON), the tensors as `weights/<name>`, and a batch of packed rows: `tokens`, `positions`,
`segment_ids` (0 is padding) and `logits`. The documents of a row went through the reference one by one, so that the
packing is ours alone.
"""

# pyright: reportMissingImports=false

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

# Documents per row; what is left of a row is padding.
ROWS, LENGTH = ((24,), (13, 8)), 24
COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
# Wavelengths of this rope lie on both sides of, and between, the two limits of the scaling.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
CASES = {
    "llama_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3,
    },
    "llama_tied": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3,
    },
    "qwen2_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": PLAIN,
    },
    "qwen2_tied": {"num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_parameters": PLAIN},
    "qwen3_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "rope_parameters": PLAIN,
    },
    "qwen3_tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": PLAIN,
    },
    "qwen3moe_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": PLAIN,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3moe_tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": PLAIN,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
}


def make_model(name: str, seed: int) -> torch.nn.Module:
    """A model with every parameter random, biases and norms too, each a bfloat16 number (such files compress)."""
    family, tied = name.split("_")
    prefix = family.capitalize().replace("moe", "Moe")
    config = getattr(transformers, f"{prefix}Config")(
        **COMMON, **CASES[name], tie_word_embeddings=tied == "tied", attn_implementation="eager"
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                value = 1 + 0.2 * noise
            elif weight.ndim == 1:
                value = 0.3 * noise
            else:
                value = noise * weight.shape[-1] ** -0.5
            weight.copy_(value.bfloat16().float())
    return model


def saved_weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Tensors under the names of a saved model; in memory, transformers 5 keeps all experts in one."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def make_batch(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Packed rows of random documents and the logits of each document alone (zeros on padding)."""
    rng = np.random.default_rng(seed)
    shape = (len(ROWS), LENGTH)
    batch: dict[str, np.ndarray] = {key: np.zeros(shape, np.int32) for key in ("tokens", "positions", "segment_ids")}
    batch["logits"] = np.zeros((*shape, COMMON["vocab_size"]), np.float32)
    for row, lengths in enumerate(ROWS):
        start = 0
        for document, length in enumerate(lengths, start=1):
            here = (row, slice(start, start + length))
            tokens = rng.integers(0, COMMON["vocab_size"], length)
            with torch.no_grad():
                logits = model(torch.from_numpy(tokens)[None]).logits[0]
            batch["tokens"][here], batch["positions"][here] = tokens, np.arange(length)
            batch["segment_ids"][here], batch["logits"][here] = document, logits.numpy()
            start += length
    return batch


def main() -> None:
    """Write one file for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(CASES):
        model = make_model(name, seed)
        tied = name.endswith("_tied")
        # A tied head is not stored a second time.
        weights = {f"weights/{key}": tensor for key, tensor in saved_weights(model).items()}
        config = {"family": name.split("_")[0], "tied": tied, **COMMON, **CASES[name]}
        path = directory / f"{name}.npz"
        arrays: dict[str, Any] = {**make_batch(model, seed), **weights}
        np.savez_compressed(path, config=np.array(json.dumps(config)), **arrays)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
