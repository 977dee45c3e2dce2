"""Third step: this process's rows of each microbatch, on the devices; a reference policy begins to score them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from axlearn_like.layers.base import Params
from mesh import shard_batch
from mesh.batches import local_rows
from rl.training.batching import Batch, Layout, Minibatch, PaddedRows, fill_packed, fill_padded
from rl.training.columns import TokenColumn
from rl.training.packing import Microbatch
from rl.training.scoring.reference_scores import ReferenceScores, StartScoring
from rl.training.steps.score import ScoredBatch


class FilledRows(NamedTuple):
    """The rows of a microbatch."""

    batch: Batch  # rows of this process
    arrays: dict[str, jax.Array]  # rows of all processes, on their devices
    pending: Callable[[], dict[str, Any]] | None  # returns the arrays of the reference, once they are there
    flops: float | None  # model FLOPs of the rows that hold anything; None: not known


class FilledBatch(NamedTuple):
    """A batch before its updates: `params` are the policy's, and `minibatches` have rows for each update."""

    scored: ScoredBatch
    params: Params
    minibatches: list[list[FilledRows]]

    @property
    def rows(self) -> list[FilledRows]:
        """Rows of all microbatches."""
        return [rows for minibatch in self.minibatches for rows in minibatch]

    @property
    def flops(self) -> float | None:
        """Model FLOPs of a pass over all rows; None: not known."""
        known = [rows.flops for rows in self.rows if rows.flops is not None]
        return sum(known, 0.0) if len(known) == len(self.rows) else None


@dataclasses.dataclass(frozen=True)
class FillStep:
    """Rows with the tokens of their rollouts, the objective's arrays and the columns."""

    layout: Layout
    columns: tuple[TokenColumn, ...] = ()
    reference: ReferenceScores | None = None  # policy whose numbers of tokens the objective reads; None: none
    # Model FLOPs of a row with so many tokens of a prompt, completions, and tokens of each, if they are known.
    row_flops: Callable[[int, int, int], float | None] = lambda prefix, samples, length: None

    def __call__(self, scored: ScoredBatch, params: Params) -> FilledBatch:
        """Return the rows of what has a gradient."""
        start = None if self.reference is None else self.reference.of_update(params, scored.step).start
        minibatches = [
            [self._rows(minibatch, microbatch, scored, start) for microbatch in minibatch.microbatches]
            for minibatch in scored.arranged.minibatches
            if minibatch.has_gradient
        ]
        return FilledBatch(scored, params, minibatches)

    def _rows(
        self, minibatch: Minibatch, microbatch: Microbatch, scored: ScoredBatch, start: StartScoring | None
    ) -> FilledRows:
        count, given = len(microbatch.rows), (minibatch.prepared, scored.contents)
        rows, samples, layout = [microbatch.rows[row] for row in local_rows(count)], 1, self.layout
        if isinstance(layout, PaddedRows):
            samples = layout.samples(scored.headers)
            batch = fill_padded(rows, *given, layout.max_prompt_tokens, layout.max_new_tokens, samples, self.columns)
        else:
            batch = fill_packed(rows, microbatch.length, *given, layout.packing, self.columns)
        arrays = shard_batch(batch, rows=count, by_length=False)
        each = self.row_flops(batch["prefix"].shape[1], samples, microbatch.length)
        flops = None if each is None else each * sum(1 for row in microbatch.rows if row)
        return FilledRows(batch, arrays, None if start is None else start(batch, arrays, count), flops)
