"""Tiny random classifiers by Hugging Face transformers: weights and scores for tests/models/huggingface/test_heads.py.

Run as tests/golden/reference/decoders.py is:

    golden/bin/python tests/golden/reference/heads.py tests/models/golden

Each file holds `config` (a config.json), the tensors as `weights/<name>`, and packed rows: `tokens`, `positions`,
`segment_ids` (0 is padding) and `scores`, of each token of a token classifier and of the last token of each document of
a sequence classifier (NaN elsewhere). The documents went through the reference one by one.
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

ROWS, LENGTH = ((12,), (7, 4)), 12  # documents of a row; what is left is padding
COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
CASES = {
    "LlamaForSequenceClassification": {"num_labels": 3},
    "Qwen2ForTokenClassification": {"num_labels": 2},
    "Gemma2ForSequenceClassification": {"num_labels": 1, "sliding_window": 5},
    "GPT2ForSequenceClassification": {"num_labels": 2, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
}


def make_model(name: str, seed: int) -> Any:
    """A model with every parameter random, each a bfloat16 number (such files compress)."""
    family = name.partition("For")[0]
    common = {"vocab_size": 48, "pad_token_id": 0} if family == "GPT2" else COMMON
    config = getattr(transformers, f"{family}Config")(**common, **CASES[name], attn_implementation="eager")
    model = getattr(transformers, name)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = 0.2 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            value = noise * scale + (1.0 if key.endswith("norm.weight") and family != "Gemma2" else 0.0)
            weight.copy_(value.bfloat16().float())
    return model


def saved(model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config.json and the tensors of a saved model."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        folder = Path(directory)
        return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def make_batch(model: Any, labels: int, seed: int) -> dict[str, np.ndarray]:
    """Packed rows of random documents, and the scores of each document alone."""
    rng, shape = np.random.default_rng(seed), (len(ROWS), LENGTH)
    batch: dict[str, np.ndarray] = {key: np.zeros(shape, np.int32) for key in ("tokens", "positions", "segment_ids")}
    batch["scores"] = np.full((*shape, labels), np.nan, np.float32)
    for row, lengths in enumerate(ROWS):
        start = 0
        for document, length in enumerate(lengths, start=1):
            here = (row, slice(start, start + length))
            tokens = rng.integers(1, 48, length)
            with torch.no_grad():
                scores = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
            batch["tokens"][here], batch["positions"][here], batch["segment_ids"][here] = (
                tokens,
                np.arange(length),
                document,
            )
            start += length
            batch["scores"][row, start - len(scores.reshape(-1, labels)) : start] = scores.reshape(-1, labels)
    return batch


def main() -> None:
    """Write one file for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for seed, name in enumerate(CASES):
        model = make_model(name, seed)
        config, tensors = saved(model)
        arrays: dict[str, Any] = {
            **make_batch(model, CASES[name]["num_labels"], seed),
            **{f"weights/{key}": tensor for key, tensor in tensors.items()},
        }
        path = directory / f"{name}.npz"
        np.savez_compressed(path, config=np.array(json.dumps(config)), **arrays)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
