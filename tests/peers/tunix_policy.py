"""The random policy of the small jobs in google-tunix's terms, for all its workers."""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from importlib.metadata import version
from typing import Any

import jax
from flax import nnx
from grpo_step.job import GrpoJob
from tunix.models.qwen3 import model as qwen3


class AsciiTokenizer:
    """One token per ASCII character; 0 is padding and 1 begins a sequence.

    The end-of-sequence id lies outside the vocabulary, so no completion ends early.
    """

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the character codes of `text`."""
        return [min(ord(character), 126) for character in text]

    def decode(self, ids: Any, **_: Any) -> str:
        """Return the text of `ids`, one character for each id, `?` for those with no character."""
        return "".join(chr(int(i)) if 2 <= int(i) < 127 else "?" for i in ids)

    def bos_id(self) -> int:
        """Id that the sampler puts in front of a prompt."""
        return 1

    def eos_id(self) -> int:
        """An id that cannot be sampled."""
        return 999

    def pad_id(self) -> int:
        """Id of padding."""
        return 0


def model_config(job: GrpoJob) -> qwen3.ModelConfig:
    """Return the policy's sizes."""
    return qwen3.ModelConfig(
        num_layers=job.layers,
        vocab_size=job.vocab,
        embed_dim=job.dim,
        hidden_dim=job.ffn,
        num_heads=job.heads,
        head_dim=job.head_dim,
        num_kv_heads=job.kv_heads,
        norm_eps=job.norm_eps,
        rope_theta=int(job.rope_theta),
        use_tied_embedding=True,
    )


def build_model(job: GrpoJob) -> qwen3.Qwen3:
    """Return the random policy, float32."""
    return qwen3.Qwen3(model_config(job), rngs=nnx.Rngs(job.seed))


def parameter_count(model: nnx.Module) -> int:
    """Return the number of parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def one_device_mesh() -> jax.sharding.Mesh:
    """Return a mesh of one device with the axes that tunix's layers name."""
    return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def system_version() -> str:
    """Return the name and version of the measured system."""
    return f"google-tunix {version('google-tunix')} (jax {jax.__version__})"
