"""The choice of what is drafted: for which dispatches, for which rows, and how many tokens.

A drafted token is kept if and only if it is the token that the key of its place draws from the policy. So neither a
draft nor any choice here can change a result; they decide how many tokens a step gives, and what it costs.
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.acceptance import Acceptance
from rl.rollout.speculation.draft import CONTEXT, NOTHING, Drafter, as_row
from rl.rollout.speculation.own_text import OwnTextDrafter
from rl.rollout.speculation.siblings import SiblingDrafter

_MEMORY = 0.5  # weight of what was measured before a dispatch with drafts, after it
_HOPE = 0.8  # the same, after one without: a row whose drafts were bad is tried again


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of the rows of a dispatch."""

    tokens: np.ndarray  # int32 [rows, length], see `as_row`; `NOTHING` in rows without one
    depths: np.ndarray  # int32 [rows], tokens that a step verifies of each row, at most
    chunk: int  # tokens that a step feeds each row: the largest depth there can be, and one


class Speculation(Configurable):
    """Drafts for the sequences of an engine, and what became of them."""

    class Config(ConfigBase["Speculation"]):
        drafters: tuple[ConfigBase, ...] = (SiblingDrafter.Config(), OwnTextDrafter.Config())  # the longest match wins
        depth: int = 7  # limit of drafted tokens of a row in a step
        most_tokens: int = 12  # rows x (depth + 1) of a step; more rows have less depth, and none at last
        text: int = 2048  # tokens of other texts that a row takes along: a step finds its place in them again
        adaptive: bool = True  # depth of each row by measured acceptance, and dispatches without drafts
        overhead: int = 8  # a step costs as much as so many tokens, and its rows x (depth + 1): where drafts pay

        @override
        def check_fields(self) -> None:
            self.require_least(1, "depth")
            self.require_least(0, "overhead")
            self.require("drafters", bool(self.drafters), "one drafter or more")
            self.require("most_tokens", self.most_tokens > self.depth, f"more than depth={self.depth}")
            least = CONTEXT + self.depth
            self.require("text", self.text >= least, f"{least} or more, with depth={self.depth}")

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._drafters: list[Drafter] = [drafter.build() for drafter in cfg.drafters]
        self._records: dict[tuple[int, int], Acceptance] = {}  # (request, sample) -> record
        self.counts = dict.fromkeys(("drafted_tokens", "accepted_tokens", "draft_dispatches", "draft_steps"), 0)

    def propose(self, sequences: Items[Sequence], *, rows: int, plain_rows: int) -> Drafts | None:
        """Return drafts for a dispatch; None: better without. `plain_rows`: rows of its shape without drafts."""
        chunk, length = chunk_of(self._cfg, rows), self._cfg.text
        if chunk < 2:
            return None
        records = [self._record(sequence) for sequence in sequences]
        depths = [self._depth(record, chunk - 1) for record in records]
        if self._pays(records, depths, rows * chunk, plain_rows):
            tokens = np.full((rows, length), NOTHING, np.int32)
            for row, sequence in enumerate(sequences):
                found = self._row(sequence) if depths[row] else None
                if found is None:
                    depths[row] = 0
                else:
                    tokens[row] = found
            if any(depths) and self._pays(records, depths, rows * chunk, plain_rows):
                return Drafts(tokens, np.array([*depths, *[0] * (rows - len(depths))], np.int32), chunk)
        for record in records:
            record.decay(_HOPE)
        return None

    def _depth(self, record: Acceptance, most: int) -> int:
        if record.refused:
            return 0
        return min(most, record.depth) if self._cfg.adaptive else most

    def _pays(self, records: Items[Acceptance], depths: Items[int], fed: int, plain_rows: int) -> bool:
        """Return True if a step with drafts is expected to give more tokens for its cost."""
        if not self._cfg.adaptive:
            return True
        gain = sum(record.gain(depth) for record, depth in zip(records, depths, strict=True))
        cost = (self._cfg.overhead + fed) / (self._cfg.overhead + plain_rows)
        return len(records) + gain > cost * len(records)

    def _row(self, sequence: Sequence) -> np.ndarray | None:
        found = [draft for one in self._drafters if (draft := one.draft(sequence, self._cfg.text)) is not None]
        return as_row(sequence.tokens, found, self._cfg.text) if found else None

    def measured(self, sequences: Items[Sequence], out: Mapping[str, Any]) -> None:
        """Take the counts of a dispatch with drafts (see `decode_drafts`)."""
        self.counts["draft_dispatches"] += 1
        self.counts["draft_steps"] += int(out["steps"])
        self.counts["drafted_tokens"] += int(out["drafted"].sum())
        self.counts["accepted_tokens"] += int(out["accepted"].sum())
        for row, sequence in enumerate(sequences):
            if sequence.ended:
                continue  # request may have ended while the device drew
            record = self._record(sequence)
            record.decay(_MEMORY)
            record.accepted += int(out["accepted"][row])
            record.missed += int(out["missed"][row])

    def refuse(self, sequence: Sequence) -> None:
        """Draft no more for a sequence."""
        self._record(sequence).refused = True

    def remember(self, group: SequenceGroup) -> None:
        """Note a request that has ended."""
        for sequence in group.sequences:
            self._records.pop((group.number, sequence.sample), None)
        for drafter in self._drafters:
            drafter.remember(group)

    def stats(self) -> dict[str, float]:
        """Return counts since the start."""
        share = self.counts["accepted_tokens"] / max(1, self.counts["drafted_tokens"])
        return {**self.counts, "draft_acceptance": share}

    def _record(self, sequence: Sequence) -> Acceptance:
        return self._records.setdefault((sequence.group.number, sequence.sample), Acceptance())


def chunk_of(cfg: Speculation.Config, rows: int) -> int:
    """Return the tokens that a step feeds each of so many rows; below 2 there is no room for a draft."""
    return min(cfg.depth + 1, cfg.most_tokens // rows)
