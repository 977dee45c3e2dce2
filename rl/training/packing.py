"""Placement of an update's rollouts in rows of a few lengths, so that little of a row is padding.

A row has places for prompts in front and for completions behind: completions of one prompt share it there, and several
prompts with theirs may share the row. A microbatch is a number of rows of one length, for which a program is compiled.
Where a rollout comes to lie is a pure function of lengths, so every process finds the same, and finds it again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.shared_prefix import SharedPrefixes
from rl.protocol.token_tree import TokenTree

_PARTS = (1, 2, 4)  # default lengths are these fractions of max_new_tokens
DEFAULT_SHAPES = len(_PARTS)
_OPEN = 32  # rows with room that are looked at; the fullest of more is closed

Sizes = tuple[int, Mapping[int, int]]  # sizes of a group: prompt tokens, rollout -> completion tokens
Row = tuple[tuple[int, tuple[int, ...]], ...]  # (group, its rollouts) in the order of the row


class Microbatch(NamedTuple):
    """Rows that are computed together, empty ones included."""

    length: int  # tokens for completions in each row
    rows: tuple[Row, ...]  # rollouts of each row


class Packing(Configurable):
    """Rows without much padding: all of the greatest length, but those of the last microbatch of an update."""

    class Config(ConfigBase["Packing"]):
        lengths: tuple[
            int, ...
        ] = ()  # tokens for completions in a row; empty: max_new_tokens, a half and a quarter of it
        prompts: int | None = None  # tokens for prompts in a row; None: room for one prompt of the greatest length
        completions: int = 32  # limit of completions in a row
        rows: int = 1  # rows of a microbatch on each device
        tree: bool = False  # rollouts of a prompt that begin alike share these tokens in a row, too

        @override
        def check_fields(self) -> None:
            self.require_least(1, "completions", "rows")
            self.require("lengths", all(length >= 1 for length in self.lengths), "1 token or more")

    def __init__(self, cfg: Config, *, max_prompt_tokens: int, max_new_tokens: int, chunks: int = 1):
        """ConfigError: rows cannot hold every rollout, or do not divide into chunks."""
        lengths = cfg.lengths or tuple(-(-max_new_tokens // (part * chunks)) * chunks for part in _PARTS)
        self.lengths = tuple(sorted(set(lengths), reverse=True))  # the greatest first
        self.prompts = max_prompt_tokens - 1 if cfg.prompts is None else cfg.prompts
        self.completions, self.rows, self.tree = cfg.completions, cfg.rows, cfg.tree
        self.max_new_tokens = max_new_tokens
        cfg.require(
            "prompts",
            self.prompts >= max_prompt_tokens - 1,
            f"max_prompt_tokens - 1 = {max_prompt_tokens - 1} tokens or more",
        )
        cfg.require(
            "lengths", self.lengths[0] >= max_new_tokens, f"one of max_new_tokens={max_new_tokens} tokens or more"
        )
        small = SharedPrefixes(self.prompts, self.lengths[0]).too_large() is None
        cfg.require("lengths", small, "rows of less than 1,048,576 tokens, prompts included")
        for length in self.lengths:
            unit = math.lcm(chunks, self.alignment(length))
            cfg.require("lengths", length % unit == 0, f"multiples of {unit} (chunks={chunks}), unlike {length}")

    def alignment(self, length: int) -> int:
        """Return the multiple of tokens at which completions begin in rows of this length."""
        return 1 if self.tree else SharedPrefixes(self.prompts, length).alignment

    def plan(
        self, groups: Sequence[Sizes], shards: int = 1, trees: Sequence[TokenTree] | None = None
    ) -> list[Microbatch]:
        """Return microbatches that hold each rollout once, for so many `shards` of rows; `trees`: common beginnings."""
        assert trees is not None or not self.tree
        known = trees if self.tree and trees is not None else [None] * len(groups)
        rows, count = self._fill(groups, known, self.lengths[0]), self.rows * shards
        assert rows is not None
        rows.sort(key=lambda row: row.left)  # the fullest first; those equally full stay in order
        complete = len(rows) - len(rows) % count
        batches = [
            Microbatch(self.lengths[0], tuple(row.content() for row in rows[at : at + count]))
            for at in range(0, complete, count)
        ]
        if rows[complete:] or not rows:
            batches.append(self._last(groups, known, rows[complete:], count))
        return batches

    def _last(
        self, groups: Sequence[Sizes], trees: Sequence[TokenTree | None], rows: "list[_Row]", count: int
    ) -> Microbatch:
        """Return the rows that do not fill a microbatch as one of the least length that holds their rollouts."""
        kept: list[dict[int, int]] = [{} for _ in groups]
        for row in rows:
            for group, rollouts in row.content():
                kept[group] |= {rollout: groups[group][1][rollout] for rollout in rollouts}
        rest = [(prompt, left) for (prompt, _), left in zip(groups, kept, strict=True)]
        for length in reversed(self.lengths[1:]):
            if (found := self._fill(rest, trees, length, most=count)) is not None:
                rows = found
                break
        else:
            length = self.lengths[0]
        return Microbatch(length, tuple(row.content() for row in rows) + ((),) * (count - len(rows)))

    def _fill(
        self, groups: Sequence[Sizes], trees: Sequence[TokenTree | None], length: int, most: int | None = None
    ) -> "list[_Row] | None":
        """Return rows by first fit, group by group and the longest first; None if more than `most` are needed.

        With a tree a rollout goes beside the one of its group with which it shares the most.
        """
        rows: list[_Row] = []
        being_filled: list[_Row] = []
        alignment = self.alignment(length)
        for group, ((prompt, rollouts), tree) in enumerate(zip(groups, trees, strict=True)):
            shared = None if tree is None else tree.shared()
            for rollout in _in_order(rollouts, tree):
                size = -(-rollouts[rollout] // alignment) * alignment
                found = ((row.shared(group, rollout, shared), row) for row in being_filled if group in row.groups)
                beside = [(common, row) for common, row in found if row.fits(0, size - common)]
                other = (row for row in being_filled if group not in row.groups and row.fits(prompt, size))
                common, row = max(beside, key=lambda one: one[0], default=(0, None))  # first of equals
                if (row := row or next(other, None)) is None:
                    if size > length or len(rows) == most:
                        return None
                    rows.append(row := _Row(length, self.prompts, self.completions))
                    being_filled.append(row)
                    if len(being_filled) > _OPEN:
                        being_filled.remove(min(being_filled, key=lambda row: row.left))
                row.add(group, rollout, prompt, size - common)
        return rows


def _in_order(rollouts: Mapping[int, int], tree: TokenTree | None) -> list[int]:
    if tree is None:
        return sorted(rollouts, key=lambda rollout: (-rollouts[rollout], rollout))
    return [rollout for family in tree.families(rollouts) for rollout in family]


@dataclasses.dataclass(eq=False)
class _Row:
    """A row that is being filled: the tokens and completions for which it has room."""

    left: int
    prompts_left: int
    completions_left: int
    groups: dict[int, list[int]] = dataclasses.field(default_factory=dict[int, list[int]])

    def fits(self, prompt: int, size: int) -> bool:
        return size <= self.left and prompt <= self.prompts_left and self.completions_left > 0

    def shared(self, group: int, rollout: int, shared: np.ndarray | None) -> int:
        """Return the rollout's first tokens that are in the row."""
        return 0 if shared is None else int(shared[rollout, self.groups[group]].max())

    def add(self, group: int, rollout: int, prompt: int, size: int) -> None:
        if group not in self.groups:
            self.groups[group] = []
            self.prompts_left -= prompt
        self.groups[group].append(rollout)
        self.left -= size
        self.completions_left -= 1

    def content(self) -> Row:
        return tuple((group, tuple(rollouts)) for group, rollouts in self.groups.items())
