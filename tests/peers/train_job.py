"""The small supervised job that our trainer, a plain-JAX script and peers run.

A decoder in Llama's shape on random tokens: rotary embeddings, as many key/value heads as heads, an output head of its
own, each block recomputed in the backward pass, gradients clipped, AdamW.

Standard library only: peers import this file inside environments of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16")  # dtypes of activations; parameters and optimizer are float32


@dataclass(frozen=True)
class TrainJob:
    """Sizes and settings of one run; a step is one update."""

    batch: int = 8
    length: int = 256
    layers: int = 4
    dim: int = 256
    ffn: int = 1024
    heads: int = 4
    vocab: int = 1024
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    examples: int = 4096  # rows of random tokens, from which nothing can be learnt
    seed: int = 0

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        """Return the number of targets of one step."""
        return self.batch * self.length

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the decoder."""
        block = 2 * self.dim + 4 * self.dim * self.dim + 3 * self.dim * self.ffn
        return 2 * self.vocab * self.dim + self.dim + self.layers * block


QUICK = TrainJob(batch=2, length=16, layers=2, dim=16, ffn=32, heads=2, vocab=32)
