"""Llama 2 and Llama 3, 3.1, 3.2 and 3.3, as their `config.json` files describe them.

Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783.
"""

from functools import partial
from typing import Any

from axlearn_like.layers.attention.rope import Llama3Scaling
from axlearn_like.layers.decoder import Decoder
from models.dense import dense
from models.family import Family

_LLAMA2: dict[str, dict[str, Any]] = {
    "7B": {"dim": 4096, "hidden": 11008, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32},
    "13B": {"dim": 5120, "hidden": 13824, "num_layers": 40, "num_heads": 40, "num_kv_heads": 40},
    "70B": {"dim": 8192, "hidden": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8},
}
_SIZES: dict[str, dict[str, Any]] = {
    "1B": {"dim": 2048, "hidden": 8192, "num_layers": 16, "num_heads": 32, "tied": True},
    "3B": {"dim": 3072, "hidden": 8192, "num_layers": 28, "num_heads": 24, "tied": True},
    "8B": {"dim": 4096, "hidden": 14336, "num_layers": 32, "num_heads": 32},
    "70B": {"dim": 8192, "hidden": 28672, "num_layers": 80, "num_heads": 64},
    "405B": {"dim": 16384, "hidden": 53248, "num_layers": 126, "num_heads": 128},
}
# Name -> by how much the rotary frequencies are scaled down; None: the context is the 8192 tokens of training.
_FACTORS: dict[str, float | None] = {
    "Llama-3-8B": None,
    "Llama-3-70B": None,
    "Llama-3.1-8B": 8.0,
    "Llama-3.1-70B": 8.0,
    "Llama-3.1-405B": 8.0,
    "Llama-3.2-1B": 32.0,
    "Llama-3.2-3B": 32.0,
    "Llama-3.3-70B": 8.0,
}


def _llama3(size: str, factor: float | None) -> Decoder.Config:
    return dense(
        vocab_size=128_256,
        num_kv_heads=8,
        theta=500_000.0,
        eps=1e-5,
        scaling=None if factor is None else Llama3Scaling.Config(factor=factor, original_length=8192),
        max_length=8192 if factor is None else 131_072,
        **_SIZES[size],
    )


_llama2 = partial(dense, vocab_size=32_000, theta=1e4, eps=1e-5, max_length=4096)
llama = Family(
    "Llama model",
    {f"Llama-2-{size}": partial(_llama2, **shape) for size, shape in _LLAMA2.items()}
    | {name: partial(_llama3, name.split("-")[-1], factor) for name, factor in _FACTORS.items()},
)
