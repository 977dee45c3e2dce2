"""The methods that roles call on each other. A role is given these, and does not know in which process they run."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from rl.protocol.headers import GroupHeader
from rl.protocol.messages import Details, Group, Lease, PullStats, Rollout, RolloutData, Score


class LeaseSource(Protocol):
    """The controller, for a rollout worker (`Controller`)."""

    def join(self, worker: str) -> None: ...
    def lease(self, worker: str, timeout: float = 0.0) -> Lease | None: ...
    def leave(self, worker: str) -> None: ...
    def renew(self, lease: int) -> bool: ...
    def hand_back(self, lease: int, rollouts: tuple[Rollout, ...]) -> bool: ...
    def generated(self, lease: int) -> bool: ...
    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool: ...
    def status(self) -> dict[str, Any]: ...


class PolicyLeaseSource(LeaseSource, Protocol):
    """The controllers of several policies, for a worker of all (`Controllers`): each lease says whose it is.

    `lease` with a negative timeout waits for nothing, not for prompts either.
    """

    def fail(self, policy: str, why: str) -> None: ...


class BatchSource(Protocol):
    """The controller, for the trainer (`Controller`)."""

    def begin(
        self, step: int, first_version: int, held: int | None = None, pool: Mapping[str, Any] | None = None
    ) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None: ...
    def headers(self, step: int, timeout: float = 0.0) -> list[GroupHeader] | None: ...
    def contents(self, step: int, wanted: Mapping[int, tuple[int, ...]]) -> RolloutData | None: ...
    def plan_after(self, step: int) -> dict[str, Any] | None: ...
    def consumed(self, step: int) -> dict[str, float]: ...
    def finish(self, step: int) -> None: ...
    def published(self, version: int) -> None: ...
    def evaluation(self, version: int) -> dict[str, float] | None: ...
    def missing(self, step: int) -> str: ...


class WeightSource[Weights](Protocol):
    """The parameter server, for a rollout worker whose engine holds `Weights` (`Prefetcher`)."""

    def take(self, version: int, timeout: float = 0.0) -> tuple[Weights, PullStats]: ...
    def newer(self) -> tuple[int, Weights, PullStats] | None: ...


class ScoreSource(Protocol):
    """The verification service, for a rollout worker and for evaluation (`Verifier`)."""

    def score(
        self, problem_ids: Sequence[int], answers: Sequence[str], details: Sequence[Details] | None = None
    ) -> list[Score]: ...


# "rows": rows of an update, by its forward pass. "rollouts": whole sequences, in the engine's order of sums.
ReferenceRequest = Literal["rows", "rollouts"]


class ReferenceSource(Protocol):
    """The reference role, for the trainer."""

    def score(self, kind: ReferenceRequest, arrays: Mapping[str, np.ndarray], version: int) -> np.ndarray | None:
        """Return log-probabilities of `arrays["targets"]` under the reference policy, float32; None: ask again.

        Args:
            kind: "rows" of an update, scored by its forward pass and shaped like the batch's arrays of tokens; or whole
                "rollouts" [rows, length], in the engine's order of sums.
            arrays: rows of a batch, any number of them.
            version: version of the policy that the reference is made of; it may not be saved yet.
        """
        ...
