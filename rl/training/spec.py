"""Arguments that travel together: of an update's programs, a trainer's roles, the first weights, and the engines."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from axlearn_like.checkpoint.tiers import MemoryTier
from axlearn_like.layers.base import Params
from axlearn_like.layers.wrappers.shared_base import Base
from rl.parameter_server.client import ParameterServerClient
from rl.protocol.protocols import BatchSource, ReferenceSource
from rl.training.columns import TokenColumn
from rl.training.critic.shared import ValueTerm


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """Settings of what an update computes of its rows, and of how much of it at a time."""

    temperature: float  # temperature of the behaviour policy, under which the trainer scores
    chunks: int = 1  # parts of a row's tokens; the logits of one exist at a time
    # Words of a tile instead (kernels/policy_head), a multiple of 128; None: all words of a chunk
    head_tile: int | None = None
    # Parts of padded rows whose gradients are accumulated; each contributes its share of the layers' own losses
    microbatches: int = 1
    # Tokens of a completion at most, with packed rows, whose microbatches are of several shapes; None: rows are padded
    max_new_tokens: int | None = None
    columns: tuple[TokenColumn, ...] = ()  # arrays that travel with each token
    # Value loss of a critic on the policy's hidden states, whose learner is a `JointLearner`
    values: ValueTerm | None = None
    # Graph definition of the reference's output layer, where a batch has its states and that is another model; None:
    # the policy's
    reference_head: nnx.GraphDef[Any] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that tells programs of one model apart, without a critic and a reference."""
        names = tuple(column.name for column in self.columns)
        return self.temperature, self.chunks, self.head_tile, self.microbatches, self.max_new_tokens, names


@dataclasses.dataclass(frozen=True)
class TrainerServices:
    """The roles that a trainer calls."""

    controller: BatchSource  # source of batches
    weights: ParameterServerClient  # access to the parameter server
    reference: ReferenceSource | None = None  # the reference role, where the config names its devices
    states: MemoryTier | None = None  # states in the memory of another process, where a standby waits


@dataclasses.dataclass(frozen=True)
class FirstVersion:
    """Source of version 0 of the policy."""

    initial: Callable[[Any], Params] | None = None  # maps abstract parameters to it; None: the model's initialisation
    seed: int = 0  # seed of that initialisation
    # Frozen parameters that several trainers share (`make_base`). They are neither read from checkpoints nor published,
    # and only the others are initialised, by `seed`.
    base: Base | None = None
    beside: Sequence[Path] = ()  # directories of those trainers' checkpoints, whose files of the base are linked


@dataclasses.dataclass(frozen=True)
class Opponents:
    """Versions that draw in episodes of other policies, beside those that `staleness` asks for."""

    back: int = 0  # differences to the current version
    fixed: tuple[int, ...] = ()  # numbers of versions that stay for good


@dataclasses.dataclass(frozen=True)
class DrawingPolicy:
    """Differences of the policy with which engines draw from the trainer's."""

    # Function from a parameter's path and type to the type in which workers read it.
    dtypes: Callable[[str, np.dtype], np.dtype] = lambda path, dtype: dtype
    approximations: Sequence[str] = ()  # tags of what engines draw with by their config
    has_base: bool = False  # engines have the frozen parameters already; the others alone are published
    opponents: Opponents = Opponents()  # versions that draw in episodes of other policies
