"""Qwen 2, 2.5 and 3 and QwQ, as their `config.json` files say.

Technical reports: Qwen 2 arXiv 2407.10671, Qwen 2.5 arXiv 2412.15115, Qwen 3 arXiv 2505.09388. Generations 2 and 2.5
have biases on queries, keys and values; generation 3 has norms of queries and keys instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from axlearn_like.layers.decoder import Decoder
from models.dense import dense
from models.family import Family

_QWEN2: dict[str, dict[str, Any]] = {
    "0.5B": {"dim": 896, "hidden": 4864, "num_layers": 24, "num_heads": 14, "num_kv_heads": 2, "tied": True},
    "1.5B": {"dim": 1536, "hidden": 8960, "num_layers": 28, "num_heads": 12, "num_kv_heads": 2, "tied": True},
    "3B": {"dim": 2048, "hidden": 11008, "num_layers": 36, "num_heads": 16, "num_kv_heads": 2, "tied": True},
    "7B": {"dim": 3584, "hidden": 18944, "num_layers": 28, "num_heads": 28, "num_kv_heads": 4},
    "14B": {"dim": 5120, "hidden": 13824, "num_layers": 48, "num_heads": 40, "num_kv_heads": 8},
    "32B": {"dim": 5120, "hidden": 27648, "num_layers": 64, "num_heads": 40, "num_kv_heads": 8},
    "72B": {"dim": 8192, "hidden": 29568, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8},
}
_SIZES_OF_2 = ("0.5B", "1.5B", "7B", "72B")  # the others came with generation 2.5
_QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"dim": 1024, "hidden": 3072, "num_layers": 28, "num_heads": 16, "tied": True},
    "1.7B": {"dim": 2048, "hidden": 6144, "num_layers": 28, "num_heads": 16, "tied": True},
    "4B": {"dim": 2560, "hidden": 9728, "num_layers": 36, "num_heads": 32, "tied": True},
    "8B": {"dim": 4096, "hidden": 12288, "num_layers": 36, "num_heads": 32},
    "14B": {"dim": 5120, "hidden": 17408, "num_layers": 40, "num_heads": 40},
    "32B": {"dim": 5120, "hidden": 25600, "num_layers": 64, "num_heads": 64},
}


def _qwen2(size: str, *, eps: float = 1e-6, max_length: int = 32_768) -> Decoder.Config:
    shape = _QWEN2[size]
    # The larger tables are padded to a multiple of 512.
    vocab = 151_936 if "tied" in shape else 152_064
    return dense(vocab_size=vocab, theta=1_000_000.0, eps=eps, qkv_bias=True, max_length=max_length, **shape)


def _models() -> dict[str, Callable[[], Decoder.Config]]:
    # The base models from 14B on, and QwQ, have a larger epsilon; the Instruct models of all sizes have 1e-6.
    base = {size: 1e-5 if size in ("14B", "32B", "72B") else 1e-6 for size in _QWEN2}
    long = {size: 32_768 if size in ("0.5B", "1.5B", "3B") else 131_072 for size in _QWEN2}
    qwen3 = {"vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "theta": 1_000_000.0, "eps": 1e-6}
    return {
        **{f"Qwen2-{size}": partial(_qwen2, size, eps=base[size], max_length=131_072) for size in _SIZES_OF_2},
        **{f"Qwen2-{size}-Instruct": partial(_qwen2, size) for size in _SIZES_OF_2},
        **{f"Qwen2.5-{size}": partial(_qwen2, size, eps=eps, max_length=long[size]) for size, eps in base.items()},
        **{f"Qwen2.5-{size}-Instruct": partial(_qwen2, size) for size in _QWEN2},
        "QwQ-32B": partial(_qwen2, "32B", eps=1e-5, max_length=40_960),
        **{f"Qwen3-{s}": partial(dense, qk_norm=True, max_length=40_960, **qwen3, **x) for s, x in _QWEN3.items()},
    }


qwen = Family("Qwen model", _models())
