"""Mistral's dense models, as their `config.json` files describe them (arXiv 2310.06825); Mixtral stands in moe.py."""

from typing import Any

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Block, Decoder
from mesh.errors import UserError, did_you_mean
from models.dense import dense

_7B = {"dim": 4096, "hidden": 14336, "num_layers": 32}

MISTRAL: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.1": {**_7B, "vocab_size": 32_000, "theta": 1e4, "max_length": 32_768, "window": 4096},
    "Mistral-7B-v0.2": {**_7B, "vocab_size": 32_000, "theta": 1e6, "max_length": 32_768},
    "Mistral-7B-v0.3": {**_7B, "vocab_size": 32_768, "theta": 1e6, "max_length": 32_768},
    "Mistral-Nemo-12B": {
        "dim": 5120,
        "hidden": 14336,
        "num_layers": 40,
        "vocab_size": 131_072,
        "theta": 1e6,
        "max_length": 131_072,
    },
    "Mistral-Small-24B": {
        "dim": 5120,
        "hidden": 32768,
        "num_layers": 40,
        "vocab_size": 131_072,
        "theta": 1e8,
        "max_length": 32_768,
    },
}


def mistral(name: str) -> Decoder.Config:
    """The model of that name, e.g. "Mistral-7B-v0.1"; activations are bfloat16, parameters float32.

    Raises:
        UserError: there is no such model; the nearest names are given.
    """
    if name not in MISTRAL:
        raise UserError(f"no Mistral model {name!r}{did_you_mean(name, MISTRAL, limit=len(MISTRAL))}")
    shape = dict(MISTRAL[name])
    window = shape.pop("window", None)
    cfg = dense(num_heads=32, num_kv_heads=8, head_dim=128, tied=False, eps=1e-5, **shape)
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.attention, Attention.Config)
    cfg.block.attention.window = window
    return cfg.set(dtype="bfloat16")
