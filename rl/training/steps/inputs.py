"""Fourth step: the arguments of each update by a batch, with the other policies' log-probabilities of its tokens."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax

from axlearn_like.layers.base import Params
from rl.training.scoring.reference_scores import PendingArrays
from rl.training.steps.fill import FilledBatch, FilledRows


@dataclasses.dataclass(frozen=True)
class InputsStep:
    """Arguments of updates."""

    packed: bool  # an update takes several microbatches; else the arrays of one
    epochs: int = 1  # passes over the mini-batches of a batch
    # Log-probabilities of rows by the policy as it is before the first update, if the objective reads them.
    old: Callable[[Params, dict[str, jax.Array]], jax.Array] | None = None

    def __call__(self, filled: FilledBatch) -> Sequence[Any]:
        """Return the arguments of each update.

        Those of the policy are computed now, when it is still the one at the start of the update. Those of a reference
        role may come while earlier microbatches are used.
        """
        parts = [[self._complete(rows, filled.params) for rows in minibatch] for minibatch in filled.minibatches]
        inputs = [cache(partial(PendingArrays, part)) if self.packed else part[0] for part in parts]
        return PendingArrays(inputs * self.epochs)

    def _complete(self, rows: FilledRows, params: Params) -> Callable[[], dict[str, Any]]:
        old = {} if self.old is None else {"logprobs_old": self.old(params, rows.arrays)}
        pending = rows.pending or dict
        return cache(lambda: {**rows.arrays, **old, **pending()})
