"""Interface between the wire of a service and what trains, samples and keeps its adapters.

A model has the id `{session}:train:{n}`, a sampler `{session}:sample:{n}`; saved states are
`tinker://{model}/weights/{name}` (with optimizer state) and `tinker://{model}/sampler_weights/{name}`. The wire has
checked that the model, sampler or path belongs to the tenant; whether it exists is for the verbs to say (`UnknownId`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

from rl.serving.service.messages import (
    AdamParams,
    Datum,
    LoraSpec,
    LossName,
    LossOutput,
    SampleOutput,
    SampleRequest,
    ServiceError,
)

SavedKind = Literal["weights", "sampler_weights"]


class UnknownId(ServiceError):
    """A model, sampler, promise or path that this tenant does not have, whether or not another has it."""

    def __init__(self, kind: str, name: str):
        super().__init__(f"no {kind} {name[:200]!r} here")


class ServiceBusy(ServiceError):
    """A request that was not accepted, since its tenant has too many unanswered ones; the same may come again.

    Attributes:
        retry_after: seconds until another attempt may succeed.
    """

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCreated:
    """A model has a slot."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """A model has given its slot back."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step was taken."""

    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class StateSaved:
    """A state of a model lies under this path."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class StateLoaded:
    """A model continues from the state of this path."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class SamplerOpened:
    """A sampler draws from the weights that its model has now; nothing was saved under a name."""

    sampler: str


Outcome = LossOutput | SampleOutput | ModelCreated | ModelUnloaded | StepDone | StateSaved | StateLoaded | SamplerOpened


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that has a slot."""

    model: str
    spec: LoraSpec
    created: float  # seconds since the epoch


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
    """The base of all adapters.

    Attributes:
        name: what clients call it.
        context_length: tokens of a row, or of a prompt and its answer together, at most.
        max_rank: largest rank of an adapter.
        vocab_size: token ids are below this.
        tokenizer: directory of its tokenizer in Hugging Face's form; None: it has none.
    """

    name: str
    context_length: int
    max_rank: int
    vocab_size: int
    tokenizer: str | None = None


class ServiceVerbs(Protocol):
    """Training and sampling of adapters. All methods return at once and may be called from any thread.

    Requests of a model are numbered by `seq` from 1 without gaps, may arrive in any order, and run in the order of
    their numbers. Each is run once: a repeat of (model, seq), or of (sampler, seq), gets the future of the first one,
    also after the service was killed and started again. A future's exception is a ServiceError if the client can read
    it; any other is a fault of the service.

    Methods raise UnknownId or ServiceBusy themselves, before anything is accepted; what is wrong with an accepted
    request stands in its future. A request whose future is returned is on disk, if it changes a model.
    """

    @property
    def base(self) -> BaseFacts:
        """The base of all adapters."""
        ...

    def create_model(self, tenant: str, model: str, spec: LoraSpec) -> Future[ModelCreated]:
        """Give a model a slot, with random factors; a repeat of the id gets the same future."""
        ...

    def create_from_saved(self, tenant: str, model: str, path: str, optimizer: bool) -> Future[StateLoaded]:
        """Give a model a slot with a saved state, `optimizer`: with its moments and number of steps, too."""
        ...

    def forward_backward(
        self,
        tenant: str,
        model: str,
        seq: int,
        rows: Sequence[Datum],
        loss: LossName,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> Future[LossOutput]:
        """Add the gradient of a loss over rows to the model's; `forward_only`: only evaluate it."""
        ...

    def optim_step(self, tenant: str, model: str, seq: int, adam: AdamParams) -> Future[StepDone]:
        """Step by the gradients since the last step."""
        ...

    def save_weights(self, tenant: str, model: str, seq: int, name: str, overwrite: bool = False) -> Future[StateSaved]:
        """Save weights and optimizer state under `tinker://{model}/weights/{name}`."""
        ...

    def load_weights(self, tenant: str, model: str, seq: int, path: str, optimizer: bool) -> Future[StateLoaded]:
        """Continue from a saved state, `optimizer`: with its moments and number of steps, too."""
        ...

    def save_weights_for_sampler(
        self, tenant: str, model: str, seq: int, name: str, overwrite: bool = False
    ) -> Future[StateSaved]:
        """Save weights under `tinker://{model}/sampler_weights/{name}`."""
        ...

    def sampler_of_model(self, tenant: str, model: str, seq: int, sampler: str) -> Future[SamplerOpened]:
        """Open a sampler of the weights that the model has at this number."""
        ...

    def unload_model(self, tenant: str, model: str) -> Future[ModelUnloaded]:
        """Give the model's slot back after the requests that were accepted; saved states stay."""
        ...

    def refuse(self, tenant: str, model: str, seq: int, error: ServiceError) -> Future[Outcome]:
        """Note that this number was spent on a request that could not be read, so that later ones may run."""
        ...

    def recall(self, tenant: str, owner: str, seq: int) -> Future[Outcome] | None:
        """Return the future of an accepted request; seq 0 of a model is its creation. None: there is none.

        `owner` is a model or a sampler. Samples are forgotten when the service is killed: clients ask again.
        """
        ...

    def open_sampler(self, tenant: str, sampler: str, path: str | None) -> Future[SamplerOpened]:
        """Open a sampler of saved weights of either kind; None: of the base."""
        ...

    def sampler_path(self, tenant: str, sampler: str) -> str | None:
        """Return the path of an open sampler's weights; None: it draws from the base, or from weights not saved."""
        ...

    def sample(self, tenant: str, sampler: str, seq: int, request: SampleRequest) -> Future[SampleOutput]:
        """Draw samples, and score the prompt if that is asked for. The future can be cancelled."""
        ...

    def models(self, tenant: str) -> Sequence[ModelFacts]:
        """Return the models of a tenant that have a slot."""
        ...

    def saved(self, tenant: str) -> Sequence[SavedFacts]:
        """Return the saved states of a tenant, the newest first."""
        ...

    def delete_saved(self, tenant: str, path: str) -> None:
        """Delete a saved state."""
        ...

    def sessions(self) -> Sequence[tuple[str, str]]:
        """Return (tenant, session) of every session that has models or samplers, as they are after a restart, too."""
        ...

    def end_session(self, tenant: str, session: str) -> Future[None]:
        """Save each model of a session under the name `session-end`, unload them, and close the samplers."""
        ...

    def close(self) -> None:
        """Stop taking requests, and end what runs."""
        ...
