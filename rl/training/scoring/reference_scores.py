"""Scores and states of the reference policy for the trainer: by its own devices, or by the reference role's."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, overload, override

import jax
import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.training.alignment.reference import Reference
from mesh import shard_batch
from rl.protocol.protocols import ReferenceRequest, ReferenceSource
from rl.training.batching import Batch
from rl.training.scoring.logprob_diff import LogprobDiff, RowsScorer
from rl.training.scoring.reference_states import ReferenceStates
from rl.training.scoring.update_logprobs import scored_arrays

_POLL = 0.05  # seconds between two questions for a version that is still written
_AT_ONCE = 2  # requests under way: one is computed while the next one travels


# (this process's rows of a microbatch, the arrays of all on the devices, their number) -> how to get what they lack.
StartScoring = Callable[[Batch, dict[str, jax.Array], int], Callable[[], dict[str, Any]]]


class ReferenceScoring(NamedTuple):
    """Scoring by the reference policy of one update."""

    start: StartScoring  # begins to score a microbatch, and returns how to get the arrays that it lacks, on the devices
    rollouts: RowsScorer  # scores rows of whole rollouts


class TrainersReference:
    """A reference policy on the trainer's devices."""

    def __init__(
        self, reference: Reference, diff: LogprobDiff, *, states: ReferenceStates | None = None, scored: bool = True
    ):
        """Take the policy, and what updates take: its states; `scored`: log-probabilities under it."""
        self._reference, self._diff = reference, diff
        self._states, self._is_scored = states, scored

    def of_update(self, params: Params, version: int) -> ReferenceScoring:
        """Return the scoring of an update that begins with this version of the policy."""
        reference = self._reference.params(params)
        head = None if self._states is None else self._states.head(reference, params)

        def start(batch: Batch, arrays: dict[str, jax.Array], count: int) -> Callable[[], dict[str, Any]]:
            found: dict[str, Any] = {}  # now: the update donates the parameters
            if self._is_scored:
                found["logprobs_reference"] = self._diff.logprobs(reference, arrays, reference=True)
            if self._states is not None and head is not None:
                found |= self._states.arrays(reference, head, arrays)
            return lambda: found

        return ReferenceScoring(start, partial(self._diff.score_rollouts, reference, reference=True))

    def figures(self) -> dict[str, float]:
        """Return nothing: the devices' queue is all that there is."""
        return {}


class RemoteReference:
    """The reference role: it scores a microbatch while the trainer fills the next one, or computes gradients."""

    def __init__(self, source: ReferenceSource, cfg: Reference.Config):
        self._source, self._cfg = source, cfg
        self._threads = ThreadPoolExecutor(_AT_ONCE, "reference")
        self._waited = 0.0

    def of_update(self, params: Params, version: int) -> ReferenceScoring:
        """Return the scoring of an update that begins with this version; the role has the parameters."""
        base = self._cfg.version_at(version)
        assert base is not None, "such a reference is refused"
        return ReferenceScoring(partial(self._start, base), partial(self._rollouts, base))

    def figures(self) -> dict[str, float]:
        """Return the seconds that the trainer has waited for answers since it was asked last."""
        waited, self._waited = self._waited, 0.0
        return {"reference_wait_seconds": waited}

    def _start(self, base: int, batch: Batch, arrays: dict[str, jax.Array], count: int) -> Callable[[], dict[str, Any]]:
        sent = scored_arrays(batch, routed=not self._cfg.another_model)
        answer = self._threads.submit(self._ask, "rows", sent, base)

        def placed() -> dict[str, Any]:
            began = time.monotonic()
            rows = {"logprobs_reference": answer.result()}
            self._waited += time.monotonic() - began
            return shard_batch(rows, rows=count, by_length=False)

        return placed

    def _ask(self, kind: ReferenceRequest, arrays: dict[str, np.ndarray], base: int) -> np.ndarray:
        while (found := self._source.score(kind, arrays, base)) is None:
            time.sleep(_POLL)
        return found

    def _rollouts(self, base: int, rows: dict[str, np.ndarray], count: int) -> np.ndarray:
        began = time.monotonic()
        found = self._ask("rollouts", rows, base)
        self._waited += time.monotonic() - began
        return found


ReferenceScores = TrainersReference | RemoteReference  # a reference policy, wherever it is


class PendingArrays(Sequence[Any]):
    """Batches of which some arrays are still under way: each is complete when it is read."""

    def __init__(self, complete: Sequence[Callable[[], Any]]):
        """Take a function for each batch; the first one is called now, since all begins with it."""
        self._complete = complete
        if complete:
            complete[0]()

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    @override
    def __getitem__(self, index: int | slice) -> Any:
        return self._complete[index]() if isinstance(index, int) else [one() for one in self._complete[index]]

    @override
    def __len__(self) -> int:
        return len(self._complete)
