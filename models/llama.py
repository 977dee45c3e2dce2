"""Llama 2 and Llama 3, 3.1, 3.2 and 3.3, as their `config.json` files describe them.

Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783.
"""

from typing import Any

from axlearn_like.layers.attention.rope import Llama3Scaling
from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean
from models.dense import dense

_SIZES: dict[str, dict[str, Any]] = {
    "1B": {"dim": 2048, "hidden": 8192, "num_layers": 16, "num_heads": 32, "head_dim": 64, "tied": True},
    "3B": {"dim": 3072, "hidden": 8192, "num_layers": 28, "num_heads": 24, "head_dim": 128, "tied": True},
    "8B": {"dim": 4096, "hidden": 14336, "num_layers": 32, "num_heads": 32, "head_dim": 128, "tied": False},
    "70B": {"dim": 8192, "hidden": 28672, "num_layers": 80, "num_heads": 64, "head_dim": 128, "tied": False},
    "405B": {"dim": 16384, "hidden": 53248, "num_layers": 126, "num_heads": 128, "head_dim": 128, "tied": False},
}

# Name -> by how much the rotary frequencies are scaled down; None: the context is the 8192 tokens of training.
LLAMA: dict[str, float | None] = {
    "Llama-3-8B": None,
    "Llama-3-70B": None,
    "Llama-3.1-8B": 8.0,
    "Llama-3.1-70B": 8.0,
    "Llama-3.1-405B": 8.0,
    "Llama-3.2-1B": 32.0,
    "Llama-3.2-3B": 32.0,
    "Llama-3.3-70B": 8.0,
}

LLAMA2: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {"dim": 4096, "hidden": 11008, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32},
    "Llama-2-13B": {"dim": 5120, "hidden": 13824, "num_layers": 40, "num_heads": 40, "num_kv_heads": 40},
    "Llama-2-70B": {"dim": 8192, "hidden": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8},
}


def llama(name: str) -> Decoder.Config:
    """The model of that name, e.g. "Llama-3.2-1B"; activations are bfloat16, parameters float32.

    Raises:
        UserError: there is no such model; the nearest names are given.
    """
    if name in LLAMA2:
        shape = LLAMA2[name]
        return dense(vocab_size=32_000, head_dim=128, tied=False, theta=1e4, eps=1e-5, max_length=4096, **shape).set(
            dtype="bfloat16"
        )
    if name not in LLAMA:
        known = [*LLAMA2, *LLAMA]
        raise UserError(f"no Llama model {name!r}{did_you_mean(name, known, limit=len(known))}")
    factor = LLAMA[name]
    scaling = None if factor is None else Llama3Scaling.Config(factor=factor, original_length=8192)
    return dense(
        vocab_size=128_256,
        num_kv_heads=8,
        theta=500_000.0,
        eps=1e-5,
        scaling=scaling,
        max_length=8192 if factor is None else 131_072,
        **_SIZES[name.split("-")[-1]],
    ).set(dtype="bfloat16")
