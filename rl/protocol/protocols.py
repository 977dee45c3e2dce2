"""The methods that roles call on each other. A role is given these, and does not know in which process they run."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from rl.protocol.headers import GroupHeader
from rl.protocol.messages import Details, Group, Lease, PullStats, Rollout, RolloutData, Score


class LeaseSource(Protocol):
    """The controller, for a rollout worker."""

    def join(self, worker: str) -> None:
        """Register a worker that starts or restarts."""
        ...

    def lease(self, worker: str, timeout: float = 0.0) -> Lease | None:
        """Grant the next work item; None if there is none within `timeout` seconds, or the run is over."""
        ...

    def leave(self, worker: str) -> None:
        """Unregister a worker that shuts down."""
        ...

    def renew(self, lease: int) -> bool:
        """Extend a lease; False if it is void."""
        ...

    def hand_back(self, lease: int, rollouts: tuple[Rollout, ...]) -> bool:
        """Store the partial rollouts of a lease for the next worker; False if it is void."""
        ...

    def generated(self, lease: int) -> bool:
        """Record that the tokens of a lease exist; False if it is void."""
        ...

    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool:
        """Accept the scored groups of a lease; False if it is void."""
        ...

    def status(self) -> dict[str, Any]:
        """Return counts; `stopped` is True when the run is over."""
        ...


class PolicyLeaseSource(LeaseSource, Protocol):
    """The controllers of several policies, for a worker of all: each lease says whose it is.

    `lease` with a negative timeout waits for nothing, not for prompts either.
    """

    def fail(self, policy: str, why: str) -> None:
        """Stop a policy by whose fault its rollouts cannot be made."""
        ...


class BatchSource(Protocol):
    """The controller, for the trainer."""

    def begin(
        self, step: int, first_version: int, held: int | None = None, pool: Mapping[str, Any] | None = None
    ) -> None:
        """Start or resume at update `step`; versions `first_version` to `step`, and `held`, can be pulled.

        `pool`: the state that `plan_after` returned for the step before.
        """
        ...

    def status(self) -> dict[str, Any]:
        """Return counts, and the newest published version."""
        ...

    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None:
        """Return all groups of a step in the order of the plan; None if some are missing after `timeout` seconds."""
        ...

    def headers(self, step: int, timeout: float = 0.0) -> list[GroupHeader] | None:
        """Return the headers of `next_batch`."""
        ...

    def contents(self, step: int, wanted: Mapping[int, tuple[int, ...]]) -> RolloutData | None:
        """Return these rollouts (group -> its rollouts) of a batch with their prompts; None if it is not complete."""
        ...

    def plan_after(self, step: int) -> dict[str, Any] | None:
        """Return the prompt "pool"'s state after this step, and "figures" of the plan for the metrics.

        {}: the plan depends on no results; None: the step is not complete.
        """
        ...

    def consumed(self, step: int) -> dict[str, float]:
        """Record that the update of this step is done; returns figures for the metrics."""
        ...

    def finish(self, step: int) -> None:
        """End the run with version `step`, before the last update of its plan."""
        ...

    def published(self, version: int) -> None:
        """Record that a version can be pulled."""
        ...

    def evaluation(self, version: int) -> dict[str, float] | None:
        """Return what the evaluation of a version has measured; None if it is not complete."""
        ...

    def missing(self, step: int) -> str:
        """Describe what a step still waits for."""
        ...


class WeightSource[Weights](Protocol):
    """The parameter server, for a rollout worker whose engine holds `Weights`."""

    def take(self, version: int, timeout: float = 0.0) -> tuple[Weights, PullStats]:
        """Wait up to `timeout` seconds for a version, and return it with the figures of its transfer."""
        ...

    def newer(self) -> tuple[int, Weights, PullStats] | None:
        """Return a newer version if one has arrived."""
        ...


class ScoreSource(Protocol):
    """The verification service, for a rollout worker and for evaluation."""

    def score(
        self, problem_ids: Sequence[int], answers: Sequence[str], details: Sequence[Details] | None = None
    ) -> list[Score]:
        """Return one score per answer, in order; `details`: what else the scorer wants to know of each."""
        ...


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
