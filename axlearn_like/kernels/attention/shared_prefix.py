"""Rows that hold a prompt once and several answers to it: what each token sees, for kernels that skip blocks of keys.

The prefix comes first, then the completions one after another. A token sees the prefix up to its own position, and its
own completion. Blocks of 1,024 keys in other completions are skipped, so 16 completions of 16,384 tokens cost 16 times
one of them.
"""

import dataclasses
from typing import Any

import numpy as np

_PLACE_BITS = 20  # of a query's code; the completion has the bits above


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """The sizes of such a row.

    Attributes:
        prefix: tokens of it, padding included.
        completions: how many.
        completion_size: tokens of each, padding included.
    """

    prefix: int
    completions: int
    completion_size: int

    @property
    def length(self) -> int:
        return self.prefix + self.completions * self.completion_size

    def too_large(self) -> str | None:
        """Why queries cannot be told apart by an int32 each, or None if they can."""
        if self.length >= 1 << _PLACE_BITS or self.completions >= 1 << (31 - _PLACE_BITS):
            return f"{self.length} tokens in {self.completions} completions are more than a row may have"
        return None

    def codes(self, length: int) -> np.ndarray:
        """int32 [length]: each query's place and completion; places behind the last completion are of one more."""
        places = np.arange(length, dtype=np.int32)
        return places | np.maximum(places - self.prefix, 0) // self.completion_size << _PLACE_BITS

    def visible(self, codes: Any, keys: Any) -> Any:
        """bool, whether queries of these codes see the keys at these places; of numpy or jax, broadcast."""
        place, start = self._interval(codes)
        return (keys <= place) & ((keys < self.prefix) | (keys >= start))

    def _interval(self, codes: Any) -> tuple[Any, Any]:
        """A query's place, and where its completion begins."""
        return codes & ((1 << _PLACE_BITS) - 1), (codes >> _PLACE_BITS) * self.completion_size + self.prefix

    def whole(self, codes: np.ndarray, first: int, last: int) -> bool | None:
        """Whether all of these queries see all keys from `first` to `last` (True) or none (False); None: unknown."""
        place, start = self._interval(codes)
        prefix = np.minimum(self.prefix - 1, place)  # the last key there that is seen
        some = (first <= prefix) | (np.maximum(first, start) <= np.minimum(last, place))
        if not some.any():
            return False
        every = (last <= prefix) | ((first >= start) & (last <= place))
        return True if every.all() else None


def shared_prefix_mask(shared_prefix: SharedPrefix, length: int) -> Any:
    """A mask of the splash kernel, [length, length], computed in the kernel.

    Blocks that are all alike are told without computing them: a row of 70,000 tokens has 5,000,000,000 pairs.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class SharedPrefixMask(masks._ComputableMask):
        def __init__(self) -> None:
            super().__init__((length, length), shared_prefix.visible)
            self.q_sequence = shared_prefix.codes(length)

        def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
            queries, keys = self.q_sequence[idx[0]], idx[1]
            alike = shared_prefix.whole(queries, keys.start, keys.stop - 1)
            if alike is not None:  # the kernel's tables ask for any() and all() of it
                return np.full((1, 1), alike)
            return shared_prefix.visible(queries[:, None], np.arange(keys.start, keys.stop, dtype=np.int32)[None])

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    return SharedPrefixMask()
