"""Mistral's dense models, as their `config.json` files describe them (arXiv 2310.06825); Mixtral stands in moe.py."""

from functools import partial
from typing import Any

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Block, Decoder
from models.dense import dense
from models.family import Family

_7B = {"dim": 4096, "hidden": 14336, "num_layers": 32, "vocab_size": 32_000, "max_length": 32_768}
_40 = {"dim": 5120, "num_layers": 40, "head_dim": 128, "vocab_size": 131_072}
_MISTRAL: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.1": {**_7B, "theta": 1e4, "window": 4096},
    "Mistral-7B-v0.2": {**_7B, "theta": 1e6},
    "Mistral-7B-v0.3": {**_7B, "theta": 1e6, "vocab_size": 32_768},
    "Mistral-Nemo-12B": {**_40, "hidden": 14336, "theta": 1e6, "max_length": 131_072},
    "Mistral-Small-24B": {**_40, "hidden": 32768, "theta": 1e8, "max_length": 32_768},
}


def _mistral(window: int | None = None, **shape: Any) -> Decoder.Config:
    cfg = dense(num_heads=32, num_kv_heads=8, eps=1e-5, **shape)
    assert isinstance(cfg.block, Block.Config) and isinstance(cfg.block.attention, Attention.Config)
    cfg.block.attention.window = window
    return cfg


mistral = Family("Mistral model", {name: partial(_mistral, **shape) for name, shape in _MISTRAL.items()})
