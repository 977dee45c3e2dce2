"""Layouts: how the rollouts of an update are placed in rows, and what the rows cost."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl.protocol.headers import GroupHeader
from rl.training.packing import Microbatch, Packing, Row, Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of equal sizes, each of one group or of some samples of it."""

    max_prompt_tokens: int  # tokens of a prompt, at most
    max_new_tokens: int  # tokens of a completion, to which every one is padded
    # The number of rows is padded to a multiple of it, which bounds the number of shapes compiled
    row_multiple: int = 1
    # Samples in a row of a group, whose prompt is then in several rows, each to be computed by itself; None: all
    samples_per_row: int | None = None

    tree = False

    def samples(self, headers: Sequence[GroupHeader]) -> int:
        """Return the samples of a row."""
        return self.samples_per_row or max(len(header.rollouts) for header in headers)

    def place(self, headers: Sequence[GroupHeader], live: np.ndarray) -> list[Microbatch]:
        """Return one microbatch: the rows in which any rollout is live, bool[groups, samples], and empty ones."""
        samples = self.samples(headers)
        parts = live.reshape(len(live), -1, samples)
        rows: list[Row] = [
            ((int(g), tuple(range(i * samples, min((i + 1) * samples, len(headers[g].rollouts))))),)
            for g, i in np.argwhere(parts.any(-1))
        ]
        total = max(self.row_multiple, -(-len(rows) // self.row_multiple) * self.row_multiple)
        return [Microbatch(self.max_new_tokens, (*rows, *[()] * (total - len(rows))))]

    def computed_tokens(self, microbatches: Sequence[Microbatch], headers: Sequence[GroupHeader]) -> int:
        """Return the tokens of all rows, padding included."""
        rows = sum(len(one.rows) for one in microbatches)
        return rows * (self.max_prompt_tokens - 1 + self.samples(headers) * self.max_new_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of several groups by a packing, which holds for every rollout."""

    packing: Packing  # plans the rows
    shards: int = 1  # devices that share the rows of a microbatch

    @property
    def max_new_tokens(self) -> int:
        """Tokens of a completion, at most."""
        return self.packing.max_new_tokens

    @property
    def tree(self) -> bool:
        """True if rollouts of a prompt that begin alike share these tokens."""
        return self.packing.tree

    def samples(self, headers: Sequence[GroupHeader]) -> int:
        """Return the samples of the largest group."""
        return max(len(header.rollouts) for header in headers)

    def place(self, headers: Sequence[GroupHeader], live: np.ndarray) -> list[Microbatch]:
        """Return microbatches with the live rollouts, bool[groups, samples]."""
        return self.packing.plan(live_sizes(headers, live), self.shards, [header.tree for header in headers])

    def computed_tokens(self, microbatches: Sequence[Microbatch], headers: Sequence[GroupHeader]) -> int:
        """Return the tokens of all rows, padding included."""
        return sum(len(one.rows) * (self.packing.prompts + one.length) for one in microbatches)


Layout = PaddedRows | PackedRows


def live_sizes(headers: Sequence[GroupHeader], live: np.ndarray) -> list[Sizes]:
    """Return the tokens of each group's prompt, and of its live rollouts, bool[groups, samples]."""
    return [
        (header.prompt_length - 1, {int(n): header.rollouts[n].length for n in np.flatnonzero(live[g])})
        for g, header in enumerate(headers)
    ]
