"""Requests of a service's clients, answers to them, and errors, as plain values and numpy arrays.

A model has the id `{session}:train:{n}`, a sampler `{session}:sample:{n}`; saved states are
`tinker://{model}/weights/{name}` (with optimizer state) and `tinker://{model}/sampler_weights/{name}`.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mesh import UserError

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
SavedKind = Literal["weights", "sampler_weights"]
Category = Literal["user", "server"]
Json = dict[str, Any]


class ServiceError(UserError):
    """A request that fails, and whose fault it is."""

    def __init__(self, message: str, category: Category = "user"):
        super().__init__(message)
        self.category: Category = category  # "user" if another request can succeed, "server" if the service is at fault


class UnknownId(ServiceError):
    """A model, sampler, promise or path that this tenant does not have, whether or not another has it."""

    def __init__(self, kind: str, name: str):
        super().__init__(f"no {kind} {name[:200]!r} here")


class ServiceBusy(ServiceError):
    """A request that was not accepted, since its tenant has too many unanswered ones; the same may come again."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after  # seconds until another attempt may succeed


# ---- requests of a model; all but passes are plain values, as the journal writes them


@dataclasses.dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter that a client asks for."""

    rank: int
    seed: int = 0  # seed of the random factors
    train_attention: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class CreateModel:
    """Give a model a slot."""

    spec: LoraSpec | None = None  # adapter to make; None: that of `path`
    path: str | None = None  # a saved state to begin with; None: random factors
    optimizer: bool = False  # take the moments and the number of steps of `path`, too
    created: float = dataclasses.field(default_factory=time.time)  # seconds since the epoch


@dataclasses.dataclass(frozen=True, slots=True)
class Datum:
    """One row to train on."""

    tokens: np.ndarray  # int32 [length], inputs of the model
    # Arrays of the loss by name, each [length]: `target_tokens` int64; `weights`, `advantages`, `logprobs` and what
    # else a loss takes float32
    inputs: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainPass:
    """Add the gradient of a loss over rows to the model's; `forward_only`: only evaluate it."""

    model: str
    rows: tuple[Datum, ...]
    loss: LossName
    config: Mapping[str, float]
    forward_only: bool = False

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class AdamParams:
    """Step by the gradients since the last step (AdamW, Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # limit of the gradient's norm; 0: none


@dataclasses.dataclass(frozen=True, slots=True)
class SaveState:
    """Save weights under a name; `weights`: with optimizer state."""

    name: str
    kind: SavedKind = "weights"
    overwrite: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LoadState:
    """Continue from a saved state; `optimizer`: with its moments and number of steps, too."""

    path: str
    optimizer: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class OpenSampler:
    """Open a sampler of the weights that the model has at this number."""

    sampler: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Spend a number on a request that could not be read, so that later ones may run."""

    error: str
    category: Category = "user"


Request = CreateModel | TrainPass | AdamParams | SaveState | LoadState | OpenSampler | Refusal


# ---- answers; those of other requests than passes are the JSON that clients get


@dataclasses.dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of one pass: log-probabilities of the targets, float32 [length] for each datum, and named sums."""

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]


Outcome = LossOutput | bytes | Json  # bytes: encoded samples


@dataclasses.dataclass(frozen=True, slots=True)
class SavedFacts:
    """A saved state."""

    path: str
    model: str
    kind: SavedKind
    spec: LoraSpec
    num_bytes: int
    created: float  # seconds since the epoch


@dataclasses.dataclass(frozen=True, slots=True)
class BaseFacts:
    """The base of all adapters."""

    name: str  # name that clients use
    context_length: int  # tokens of a row, or of a prompt and its answer together, at most
    max_rank: int  # largest rank of an adapter
    vocab_size: int  # token ids are below this
    stop_tokens: tuple[int, ...] = ()  # tokens that end every sample
    tokenizer: str | None = None  # directory of its tokenizer in Hugging Face's form; None: it has none
