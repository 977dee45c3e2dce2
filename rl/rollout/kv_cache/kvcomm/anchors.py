"""Anchors: what contexts have added to the keys and values of texts in a placeholder, and of the segment behind it.

KVCOMM (arXiv 2510.12872, NeurIPS 2025): a text whose keys and values are known without a context gets, in a new
context, what that context added to similar texts before. An anchor holds the base of such a text (its keys and values
without a context, at position 0) and these offsets. A text that is not clearly nearer to some anchors than to others
is computed as ever, and becomes an anchor.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.rollout.kv_cache.kvcomm.arrays import Tokens, compare, empty_stack, put

TAG = "kvcomm"  # tag of rollouts over such keys and values


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """Offsets of the anchors of a placeholder, and the weight of each, for its text and for the segment behind."""

    own: tuple[Tokens, Tokens]
    behind: tuple[Tokens, Tokens] | None  # None: no anchor has a segment behind it


class KVComm(Configurable):
    """Bases of segments and anchors of placeholders, of the weights that are in place."""

    class Config(ConfigBase["KVComm"]):
        """Sizes and thresholds; the defaults are the paper's, but for `bases` and `least_tokens`."""

        anchors: int = 20  # anchors of a placeholder in a template, at most
        least_anchors: int = 2  # anchors of at least the text's length, without which it is computed
        entropy: float = 0.3  # share of the highest entropy of the anchors' weights above which a text is computed
        oldest: int = 5  # anchors of which the least used one makes room
        top_p: float = 0.9  # weight of the nearest anchors that count as used
        temperature: float = 1.0  # temperature of the softmax over distances that makes the weights
        offsets: bool = True  # False: rotation alone, without anchors; to compare with
        bases: int = 64  # segments whose base is kept, least recently used first to go
        # Tokens of a long segment: what is behind the last one is computed, and so is all if a prefix leaves fewer
        least_tokens: int = 64

        def check_fields(self) -> None:
            """Refuse numbers that no pool of anchors can have."""
            self.require_least(1, "anchors", "least_anchors", "oldest", "bases", "least_tokens")
            fits = self.least_anchors <= self.anchors
            self.require("least_anchors", fits, f"at most anchors={self.anchors}")
            self.require("entropy", 0 <= self.entropy <= 1, "0 to 1")
            self.require("top_p", 0 < self.top_p <= 1, "more than 0, at most 1")
            self.require("temperature", self.temperature > 0, "more than 0")

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._bases: OrderedDict[tuple[Any, bytes], Tokens] = OrderedDict()
        self._anchors: dict[tuple[Any, Hashable, int], _Anchors] = {}
        names: tuple[str, ...] = ("requests", "reused_requests", "prompt_tokens", "reused_tokens", "base_tokens")
        self._counts: dict[str, int] = dict.fromkeys(names, 0)

    def forget(self, stays: Callable[[Any], bool] = lambda key: False) -> None:
        """Drop what belongs to keys (version, adapter) that do not stay: all, where the weights have changed."""
        self._bases = OrderedDict((key, one) for key, one in self._bases.items() if stays(key[0]))
        self._anchors = {key: one for key, one in self._anchors.items() if stays(key[0])}

    def stats(self) -> dict[str, float]:
        """Return counts since the start, the anchors that there are, and the share of prompts that was reused."""
        rate = self._counts["reused_tokens"] / max(1, self._counts["prompt_tokens"])
        held = sum(len(one.lengths) for one in self._anchors.values())
        return {"kvcomm_anchors": held, "kvcomm_reuse": rate, **{f"kvcomm_{k}": v for k, v in self._counts.items()}}

    def count(self, **more: int) -> None:
        """Count requests with segments, and their tokens."""
        for name, number in more.items():
            self._counts[name] += number

    def base(self, key: Hashable, tokens: bytes) -> Tokens | None:
        """Return the base of a segment, if it is known."""
        if (found := self._bases.get((key, tokens))) is not None:
            self._bases.move_to_end((key, tokens))
        return found

    def keep_base(self, key: Hashable, tokens: bytes, base: Tokens) -> None:
        """Keep the base of a segment."""
        self._bases[key, tokens] = base
        while len(self._bases) > self.cfg.bases:
            self._bases.popitem(last=False)

    def correction(self, key: Hashable, place: Hashable, base: Tokens, count: int) -> Correction | None:
        """Return how to correct `count` tokens at a `place` (template, placeholder), or None: compute them."""
        found = self._anchors.get((key, place, _size(base)))
        if found is None or len(found.usable(count)) < self.cfg.least_anchors:
            return None
        usable = np.isin(np.arange(self.cfg.anchors), found.usable(count))
        arguments = base, found.bases, usable, np.int32(count), np.float32(self.cfg.temperature)
        distances, of_tokens, of_channels = compare(*arguments)
        near = _softmax(-np.asarray(jax.device_get(distances), np.float64)[usable])
        entropy = -float(np.sum(near * np.log2(np.maximum(near, 1e-300))))
        if entropy > self.cfg.entropy * math.log2(len(near)):
            return None
        found.use(np.flatnonzero(usable), near, self.cfg.top_p)
        behind = None if found.behind is None else (found.behind, of_channels)
        return Correction((found.offsets, of_tokens), behind)

    def add(self, key: Hashable, place: Hashable, count: int, anchor: tuple[Tokens, Tokens, Tokens | None]) -> None:
        """Make an anchor of a text of `count` tokens: base, offsets, and offsets of the segment behind."""
        where = key, place, _size(anchor[0])
        if where not in self._anchors:
            self._anchors[where] = _Anchors(anchor, self.cfg.anchors)
        self._anchors[where].add(count, anchor, self.cfg.oldest)


class _Anchors:
    """The anchors of a placeholder, in stacks of a fixed number."""

    def __init__(self, like: tuple[Tokens, Tokens, Tokens | None], most: int):
        base, offsets, behind = like
        self._most = most
        self.bases, self.offsets = empty_stack(base, most), empty_stack(offsets, most)
        self.behind = None if behind is None else empty_stack(behind, most)
        self.lengths: dict[int, int] = {}  # place in the stacks -> tokens; oldest first
        self._uses: dict[int, int] = {}

    def usable(self, count: int) -> list[int]:
        """Return the places of anchors of so many tokens or more."""
        return sorted(place for place, length in self.lengths.items() if length >= count)

    def use(self, places: np.ndarray, near: np.ndarray, top_p: float) -> None:
        """Count a use of the nearest anchors, whose weights `near` add up to `top_p`."""
        order = np.argsort(-near)
        enough = int(np.searchsorted(np.cumsum(near[order]), top_p)) + 1
        for place in places[order[:enough]].tolist():
            self._uses[place] += 1

    def add(self, count: int, anchor: tuple[Tokens, Tokens, Tokens | None], oldest: int) -> None:
        """Put an anchor in; of the oldest ones, the least used makes room."""
        if len(self.lengths) < self._most:
            place = len(self.lengths)
        else:
            place = min(list(self.lengths)[:oldest], key=lambda one: self._uses[one])
            del self.lengths[place]
        self.lengths[place], self._uses[place] = count, 0
        base, offsets, behind = anchor
        self.bases = put(self.bases, np.int32(place), base)
        self.offsets = put(self.offsets, np.int32(place), offsets)
        if behind is not None and self.behind is not None:
            self.behind = put(self.behind, np.int32(place), behind)


def _size(tokens: Tokens) -> int:
    return next(iter(tokens.values())).shape[1]


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()
