"""Requests of a service's clients and answers to them, as plain values and numpy arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from mesh import UserError

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
StopReason = Literal["stop", "length"]


class ServiceError(UserError):
    """A request that fails, and whose fault it is.

    Attributes:
        category: "user" if another request can succeed, "server" if the service is at fault.
    """

    def __init__(self, message: str, category: Literal["user", "server"] = "user"):
        super().__init__(message)
        self.category = category


@dataclasses.dataclass(frozen=True, slots=True)
class Datum:
    """One row to train on.

    Attributes:
        tokens: int32 [length], inputs of the model.
        inputs: arrays of the loss by name, each [length]: `target_tokens` int64; `weights`, `advantages`, `logprobs`
            and what else a loss takes float32.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter that a client asks for."""

    rank: int
    seed: int = 0  # seed of the random factors
    train_attention: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one optimizer step (AdamW, Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # limit of the gradient's norm; 0: none


@dataclasses.dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of one pass: log-probabilities of the targets, float32 [length] for each datum, and named sums."""

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for samples of one prompt.

    Attributes:
        tokens: int32 [length], the prompt.
        seed: seed of the draws; the same request has the same answer. None: the service chooses.
        stop: texts or token ids that end a sample.
        prompt_logprobs: the log-probabilities of the prompt's tokens are wanted, too.
        top_prompt_logprobs: number of most likely tokens wanted at each place of the prompt.
    """

    tokens: np.ndarray
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str | int, ...] = ()
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One completion: int32 tokens, and the float32 log-probability of each."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason


@dataclasses.dataclass(frozen=True, slots=True)
class SampleOutput:
    """Samples of a request, in order.

    Attributes:
        prompt_logprobs: float32 [length], NaN first; None: they were not asked for.
        top_prompt_logprobs: (token, log-probability) pairs by place of the prompt; None: they were not asked for.
    """

    samples: tuple[Sample, ...]
    prompt_logprobs: np.ndarray | None = None
    top_prompt_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
