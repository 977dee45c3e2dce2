"""Gemma 2 and 3 (their text models), as their `config.json` files describe them.

Technical reports: Gemma 2 arXiv 2408.00118, Gemma 3 arXiv 2503.19786. Both have norms before and behind each layer, an
embedding scaled by the root of the width, and blocks with a sliding window among those that see everything: one of two
in Gemma 2, five of six in Gemma 3. Gemma 2 caps scores and logits; Gemma 3 normalises queries and keys instead.
"""

from functools import partial
from typing import Any

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.attention.rope_scaling import LinearScaling
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Decoder, SandwichBlock
from axlearn_like.layers.embedding import ScaledEmbedding
from axlearn_like.layers.feed_forward import GLU
from axlearn_like.layers.norm import OffsetRMSNorm
from models.family import Family

# `scalar`: scores are multiplied by scalar ** -0.5.
_GEMMA2: dict[str, dict[str, Any]] = {
    "2B": {"dim": 2304, "hidden": 9216, "num_layers": 26, "heads": (8, 4, 256), "scalar": 256},
    "9B": {"dim": 3584, "hidden": 14336, "num_layers": 42, "heads": (16, 8, 256), "scalar": 256},
    "27B": {"dim": 4608, "hidden": 36864, "num_layers": 46, "heads": (32, 16, 128), "scalar": 144},
}
# The larger ones were stretched to 131,072 tokens, and have 64 words more for images.
_GEMMA3: dict[str, dict[str, Any]] = {
    "270M": {"dim": 640, "hidden": 2048, "num_layers": 18, "heads": (4, 1, 256), "scalar": 256, "long": False},
    "1B": {"dim": 1152, "hidden": 6912, "num_layers": 26, "heads": (4, 1, 256), "scalar": 256, "long": False},
    "4B": {"dim": 2560, "hidden": 10240, "num_layers": 34, "heads": (8, 4, 256), "scalar": 256, "long": True},
    "12B": {"dim": 3840, "hidden": 15360, "num_layers": 48, "heads": (16, 8, 256), "scalar": 256, "long": True},
    "27B": {"dim": 5376, "hidden": 21504, "num_layers": 62, "heads": (32, 16, 128), "scalar": 168, "long": True},
}


def gemma2(
    *,
    window: int = 4096,
    score_cap: float | None = 50.0,
    logit_cap: float | None = 30.0,
    rope: Rope.Config | None = None,
    kinds: tuple[bool, ...] = (True, False),
    **shape: Any,
) -> Decoder.Config:
    """Gemma 2.

    Args:
        window: tokens that blocks with a window see.
        score_cap: soft cap of attention scores.
        kinds: True for each block of a round that has a window.
        shape: the other arguments of `sandwich`.
    """
    rope = rope or Rope.Config(max_length=8192)
    fields = [{"window": window if local else None, "soft_cap": score_cap, "rope": rope} for local in kinds]
    return sandwich(kinds=tuple(fields), logit_cap=logit_cap, **shape)


def gemma3(
    *,
    window: int,
    local: Rope.Config,
    far: Rope.Config,
    kinds: tuple[bool, ...] = (True, True, True, True, True, False),
    eps: float = 1e-6,
    logit_cap: float | None = None,
    score_cap: float | None = None,
    **shape: Any,
) -> Decoder.Config:
    """Gemma 3: `local` is the rotary embedding of blocks with a window, `far` that of the others; see `gemma2`."""
    near = {"window": window, "rope": local}
    more = {"qk_norm": OffsetRMSNorm.Config(eps=eps), "soft_cap": score_cap}
    fields = tuple({**(near if one else {"rope": far}), **more} for one in kinds)
    return sandwich(kinds=fields, eps=eps, logit_cap=logit_cap, **shape)


def sandwich(
    *,
    vocab_size: int,
    dim: int,
    hidden: int,
    num_layers: int,
    heads: tuple[int, int, int],
    scalar: float,
    kinds: tuple[dict[str, Any], ...],
    logit_cap: float | None,
    eps: float = 1e-6,
) -> Decoder.Config:
    """Blocks of several kinds with norms before and behind each layer, and GeGLU.

    Args:
        vocab_size: rows of the embedding, which is the head too.
        hidden: width of the feed-forward network.
        heads: query heads, key/value heads, and their width.
        scalar: scores are multiplied by scalar ** -0.5.
        kinds: fields of the attention of each kind of block.
    """
    num_heads, num_kv_heads, head_dim = heads
    attention = Attention.Config(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=float(scalar) ** -0.5
    )
    norm = OffsetRMSNorm.Config(eps=eps)

    def block(fields: dict[str, Any]) -> SandwichBlock.Config:
        glu = GLU.Config(hidden=hidden, activation="gelu_tanh")
        return SandwichBlock.Config(norm=norm.clone(), attention=attention.clone(**fields), feed_forward=glu).clone()

    blocks = tuple(block(fields) for fields in kinds)
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        embedding=ScaledEmbedding.Config(logit_soft_cap=logit_cap),
        block=blocks[0] if len(blocks) == 1 else BlockPattern.Config(blocks=blocks),
        norm=norm,
    )


def _gemma3(*, long: bool, **shape: Any) -> Decoder.Config:
    length = 131_072 if long else 32_768
    far = Rope.Config(theta=1e6, max_length=length, scaling=LinearScaling.Config(factor=8.0) if long else None)
    local = Rope.Config(theta=1e4, max_length=length)
    vocab_size, window = (262_208, 1024) if long else (262_144, 512)
    return gemma3(vocab_size=vocab_size, window=window, local=local, far=far, **shape)


gemma = Family(
    "Gemma model",
    {f"Gemma-2-{size}": partial(gemma2, vocab_size=256_000, **shape) for size, shape in _GEMMA2.items()}
    | {f"Gemma-3-{size}": partial(_gemma3, **shape) for size, shape in _GEMMA3.items()},
)
