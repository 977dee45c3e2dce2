"""Decoders with mixtures of experts: Qwen3 MoE, Mixtral, DeepSeek-V3's feed-forward layer, and a tiny one.

As their `config.json` files say. Technical reports: Qwen 3 arXiv 2505.09388, Mixtral arXiv 2401.04088, DeepSeek-V3
arXiv 2412.19437.
"""

from functools import partial
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter, SoftmaxRouter
from models.dense import dense
from models.family import Family
from models.tiny import tiny

_QWEN3: dict[str, dict[str, Any]] = {
    "30B-A3B": {"dim": 2048, "expert_hidden": 768, "num_layers": 48, "num_heads": 32},
    "235B-A22B": {"dim": 4096, "expert_hidden": 1536, "num_layers": 94, "num_heads": 64},
}
_MIXTRAL: dict[str, dict[str, Any]] = {
    "8x7B": {"dim": 4096, "expert_hidden": 14336, "num_layers": 32, "num_heads": 32, "load_balance": 0.02},
    "8x22B": {"dim": 6144, "expert_hidden": 16384, "num_layers": 56, "num_heads": 48, "load_balance": 0.001},
}


def mixture(feed_forward: ConfigBase[Any], **shape: Any) -> Decoder.Config:
    """`dense` with another feed-forward layer.

    Args:
        feed_forward: the layer of every block.
        shape: arguments of `dense`, without `hidden`.
    """
    return _with(dense(hidden=1, **shape), feed_forward)


def deepseek_v3_feed_forward() -> MoE.Config:
    """DeepSeek-V3's mixture, from its fourth block on: sigmoid router with bias, 8 of 256 experts, and a shared one.

    11.5 billion parameters. A token sees experts of 4 of 8 groups.
    """
    router = SigmoidRouter.Config(top_k=8, scale=2.5, groups=8, groups_kept=4, sequence_balance=0.0001)
    return MoE.Config(
        num_experts=256, router=router, experts=Experts.Config(hidden=2048), shared=SwiGLU.Config(hidden=2048)
    )


def tiny_moe(
    *, vocab_size: int, num_experts: int = 8, top_k: int = 2, expert_hidden: int = 192, **shape: Any
) -> Decoder.Config:
    """`tiny` with as many parameters in use for a token, and 2.1 M more in other experts."""
    router = SoftmaxRouter.Config(top_k=top_k, load_balance=0.01, z_loss=0.001)
    experts = Experts.Config(hidden=expert_hidden)
    return _with(
        tiny(vocab_size=vocab_size, **shape), MoE.Config(num_experts=num_experts, router=router, experts=experts)
    )


def _with(cfg: Decoder.Config, feed_forward: ConfigBase[Any]) -> Decoder.Config:
    assert isinstance(cfg.block, Block.Config)
    cfg.block.feed_forward = feed_forward
    return cfg


def _qwen3(expert_hidden: int, **shape: Any) -> Decoder.Config:
    router = SoftmaxRouter.Config(top_k=8, renormalise=True, load_balance=0.001)
    experts = MoE.Config(num_experts=128, router=router, experts=Experts.Config(hidden=expert_hidden))
    common = {"vocab_size": 151_936, "num_kv_heads": 4, "head_dim": 128, "theta": 1_000_000.0, "eps": 1e-6}
    return mixture(experts, qk_norm=True, **common, **shape)


def _mixtral(expert_hidden: int, load_balance: float, **shape: Any) -> Decoder.Config:
    router = SoftmaxRouter.Config(top_k=2, renormalise=True, load_balance=load_balance)
    experts = MoE.Config(num_experts=8, router=router, experts=Experts.Config(hidden=expert_hidden))
    return mixture(experts, vocab_size=32_000, num_kv_heads=8, theta=1_000_000.0, eps=1e-5, **shape)


moe = Family(
    "mixture of experts",
    {f"Qwen3-{size}": partial(_qwen3, **shape) for size, shape in _QWEN3.items()}
    | {f"Mixtral-{size}": partial(_mixtral, **shape) for size, shape in _MIXTRAL.items()},
)
