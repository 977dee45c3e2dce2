"""Rows that hold a prompt once and several completions of it: masks for kernels that skip blocks of keys.

The prefix comes first, then the completions one after another. A token sees the prefix up to its own position, and its
own completion. Blocks of 1,024 keys in other completions are skipped, so 16 completions of 16,384 tokens cost 16 times
one of them.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.splash_internals import computed_mask

_PLACE_BITS = 20  # bits of the place in a query's code; the completion's index has the bits above


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """The sizes of such a row."""

    prefix: int  # tokens of the prompt, padding included
    completions: int  # number of completions
    completion_size: int  # tokens of each, padding included

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.prefix + self.completions * self.completion_size

    def too_large(self) -> str | None:
        """Return why int32 codes cannot tell queries apart, or None if they can."""
        if self.length >= 1 << _PLACE_BITS or self.completions >= 1 << (31 - _PLACE_BITS):
            return f"{self.length} tokens in {self.completions} completions are more than a row may have"
        return None

    def codes(self, length: int) -> np.ndarray:
        """Return int32 [length]: index and completion of each query; padding after the last counts as one more."""
        places = np.arange(length, dtype=np.int32)
        return places | np.maximum(places - self.prefix, 0) // self.completion_size << _PLACE_BITS

    def visible(self, codes: Any, keys: Any) -> Any:
        """Return bool: queries of these codes see the keys at these indices; numpy or jax arrays, broadcast."""
        return _seen(self.prefix, *self._interval(codes), keys)

    def _interval(self, codes: Any) -> tuple[Any, Any]:
        """Return a query's index, and where its completion begins."""
        return codes & ((1 << _PLACE_BITS) - 1), (codes >> _PLACE_BITS) * self.completion_size + self.prefix

    def uniform(self, codes: np.ndarray, first: int, last: int) -> bool | None:
        """Return True if all these queries see all keys from `first` to `last`, False if none does, None if unknown."""
        place, start = self._interval(codes)
        prefix = np.minimum(self.prefix - 1, place)  # the last key there that is seen
        some = (first <= prefix) | (np.maximum(first, start) <= np.minimum(last, place))
        if not some.any():
            return False
        every = (last <= prefix) | ((first >= start) & (last <= place))
        return True if every.all() else None


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """The sizes of a row that holds several prompts, then completions of any of them."""

    prefix: int  # tokens of all prompts, padding included
    completion_size: int  # tokens of all completions, or trees of them, padding included

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.prefix + self.completion_size


class SharedPrefixes(_Prompts):
    """Completions of any lengths.

    A token sees the keys of its own prompt and completions alone (by segment ids), and of these the prompt and its own
    completion. Where completions begin differs from row to row.
    """

    @property
    def alignment(self) -> int:
        """Multiple of tokens, after the prompts, at which completions begin: 1 in rows of up to 32,768 tokens."""
        starts = 1 << (31 - self._place_bits)
        return 1 << max(0, (-(-self.completion_size // starts) - 1).bit_length())

    @property
    def _place_bits(self) -> int:
        return self.length.bit_length()

    def codes(self, starts: Any) -> Any:
        """Return int32 [..., length], index and start of each query, from the index where its completion begins.

        Args:
            starts: int32 [..., completion_size], multiples of the alignment, counted from the first completion's.
        """
        prefix = [(0, 0)] * (starts.ndim - 1) + [(self.prefix, 0)]
        return self.codes_at(jnp.arange(self.length, dtype=jnp.int32), jnp.pad(starts, prefix))

    def codes_at(self, places: Any, starts: Any) -> Any:
        """Return the codes of queries at these indices of the row; in prompts `starts` are 0."""
        return places | starts // self.alignment << self._place_bits

    def too_large(self) -> str | None:
        """Return why int32 codes cannot tell queries apart, or None if they can."""
        return f"{self.length} tokens are more than a row may have" if self._place_bits > _PLACE_BITS else None

    def visible(self, codes: Any, keys: Any) -> Any:
        """Return bool: queries of these codes see the keys at these indices, if these are of their own prompt."""
        place = codes & ((1 << self._place_bits) - 1)
        return _seen(self.prefix, place, (codes >> self._place_bits) * self.alignment + self.prefix, keys)


class SharedPrefixTrees(_Prompts):
    """Completions that share what they begin with.

    Behind the prompts are the segments of trees: a segment continues its parent, or a prompt. Each is followed by all
    that continues it before another begins (pre-order), so those who see a token are in one piece, from itself to the
    end of its subtree. `SharedPrefixes` are trees of one segment each.
    """

    def codes(self, ends: Any) -> Any:
        """Return int32 [..., length], the index in the row at which a token's subtree ends; of prompts, the row's end.

        Args:
            ends: int32 [..., completion_size], the same counted from the first tree's token.
        """
        prefix = [(0, 0)] * (ends.ndim - 1) + [(self.prefix, 0)]
        return jnp.pad(ends + self.prefix, prefix, constant_values=self.length)

    def visible(self, codes: Any, queries: Any) -> Any:
        """Return bool [..., queries, length]: the keys of a row that queries see, if these are of their own prompt.

        Args:
            codes: codes of the keys.
            queries: int32, indices in the row.
        """
        keys = jnp.arange(codes.shape[-1], dtype=jnp.int32)
        return (keys <= queries[:, None]) & (queries[:, None] < codes[..., None, :])


def _seen(prefix: int, place: Any, start: Any, keys: Any) -> Any:
    """Return bool: a query at this place, whose completion begins at `start`, sees these keys."""
    return (keys <= place) & ((keys < prefix) | (keys >= start))


PrefixRows = SharedPrefix | SharedPrefixes | SharedPrefixTrees


def shared_prefix_mask(shared_prefix: SharedPrefix, places: np.ndarray) -> Any:
    """Return a mask of the splash kernel, [length, length], for queries at these `places`; the kernel computes it."""
    codes = shared_prefix.codes(len(places))[places]
    return computed_mask(codes, len(places), shared_prefix.visible, shared_prefix.uniform)
