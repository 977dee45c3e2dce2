"""Bloom filters (Bloom, 1970) of the tenants of each leaf: whom a deleted document may concern, without a list of them.

A list of the tenants of each document would take as much memory as the vectors. A filter of a leaf may name too many,
never too few; what it names is looked up exactly.
"""

from collections.abc import Iterable

import numpy as np
import xxhash

from rl.environments.retrieval.clusters import Array

_WORDS = 32  # words of 64 bits for each leaf
_PROBES = 3  # bits for each tenant


class TenantFilters:
    """Filters of leaves: 256 bytes each, with three bits for each tenant."""

    def __init__(self, leaves: int):
        self._bits = np.zeros((leaves, _WORDS), np.uint64)
        self._names: dict[str, int] = {}
        self._probes = np.zeros((16, _PROBES), np.int64)

    def add(self, tenant: str, places: Array) -> None:
        """Note a tenant in the leaves of these numbers."""
        number = self._number(tenant)  # may replace the table of probes
        probes = self._probes[number]
        words, masks = probes // 64, np.uint64(1) << (probes % 64).astype(np.uint64)
        leaves = np.unique(places)
        for word, mask in zip(words, masks, strict=True):
            self._bits[leaves, word] |= mask

    def candidates(self, places: Iterable[int]) -> set[str]:
        """Return the tenants that may have documents in these leaves: all that have, and a few others."""
        probes = self._probes[: len(self._names)]
        masks = np.uint64(1) << (probes % 64).astype(np.uint64)
        named = np.zeros(len(probes), bool)
        for place in set(places):
            bits = self._bits[place]
            named |= ((bits[probes // 64] & masks) != 0).all(axis=1)
        names = list(self._names)
        return {names[number] for number in np.flatnonzero(named)}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return self._bits.nbytes + self._probes.nbytes

    def _number(self, tenant: str) -> int:
        number = self._names.setdefault(tenant, len(self._names))
        if number == len(self._probes):
            self._probes = np.concatenate([self._probes, np.zeros_like(self._probes)])
        found = xxhash.xxh3_128_intdigest(tenant.encode())
        self._probes[number] = [(found >> 32 * n) % (64 * _WORDS) for n in range(_PROBES)]
        return number
