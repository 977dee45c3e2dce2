"""Passages for many tenants, ranked by words or by vectors; an episode may add some of its own, which end with it."""

import abc
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, override

import numpy as np

from rl.environments.retrieval.bm25 import BM25, rank
from rl.environments.retrieval.clusters import Array
from rl.environments.retrieval.embedding import Embedder
from rl.environments.retrieval.index import TenantIndex
from rl.environments.retrieval.state import EVERYONE


class Passage(NamedTuple):
    """A text, and the tenants that see it; `"*"` is everyone."""

    text: str
    tenants: tuple[str, ...] = (EVERYONE,)


class Reader(NamedTuple):
    """Passages as one episode sees them: `search(query, count)` and, at the end of the episode, `close()`."""

    search: Callable[[str, int], list[str]]
    close: Callable[[], None]


class Corpus(abc.ABC):
    """Passages of a process. Episodes in any number of threads read it."""

    @abc.abstractmethod
    def open(self, tenants: Sequence[str], own: Sequence[str] = ()) -> Reader:
        """Return the passages that tenants see, with those of everyone and `own`, which nobody else sees."""


class WordCorpus(Corpus):
    """Passages ranked by BM25, with weights that follow from what is seen."""

    def __init__(self, passages: Sequence[Passage]):
        """Count words once for all tenants."""
        self._texts = [passage.text for passage in passages]
        self._index = BM25(self._texts)
        self._seen = {tenant: np.asarray(numbers, np.int64) for tenant, numbers in _by_tenant(passages).items()}

    @override
    def open(self, tenants: Sequence[str], own: Sequence[str] = ()) -> Reader:
        nothing = np.zeros(0, np.int64)
        seen = np.unique(np.concatenate([self._seen.get(name, nothing) for name in (*tenants, EVERYONE)]))
        parts = [(self._index, seen), (BM25(own), None)]
        texts = (self._texts, own)

        def search(query: str, count: int) -> list[str]:
            return [texts[part][number] for part, number, _ in rank(query, count, parts)]

        return Reader(search, lambda: None)


class VectorCorpus(Corpus):
    """Passages ranked by the distance of their vectors, in an index that all tenants share."""

    def __init__(self, passages: Sequence[Passage], embedder: Embedder, file: str | os.PathLike[str] | None = None):
        """Embed the passages, or read their index from a file.

        Args:
            file: kept between processes and runs; written where it is not there.

        Raises:
            UserError: the file is damaged or of other passages, or there are no vectors.
        """
        self._texts = {number: passage.text for number, passage in enumerate(passages)}
        self._embedder, self._next = embedder, itertools.count(len(passages))
        note = _note(passages, embedder)
        if file is not None and Path(file).exists():
            self._index = TenantIndex.load(file, note)
            return
        vectors = embedder.embed([passage.text for passage in passages])
        self._index = TenantIndex(vectors.shape[1])
        self._index.insert(np.arange(len(passages)), vectors)
        for tenant, numbers in _by_tenant(passages).items():
            self._index.grant(tenant, numbers)
        if file is not None:
            self._index.save(file, note)

    @override
    def open(self, tenants: Sequence[str], own: Sequence[str] = ()) -> Reader:
        numbers = [next(self._next) for _ in own]
        names = tuple(tenants)
        if own:
            names = (*names, f"episode {numbers[0]}")  # name without a colon: no name of a field's value
            vectors = self._embedder.embed(own)
            self._texts.update(zip(numbers, own, strict=True))
            self._index.insert(numbers, vectors, names[-1:])

        def search(query: str, count: int) -> list[str]:
            found = self._index.search(self._embedder.embed([query])[0], names, count)[0].tolist()
            for number in found:
                self._index.check(number, names)  # second check, by number, of everything that is shown
            return [self._texts[number] for number in found]

        def close() -> None:
            if own:
                self._index.delete(numbers)
                self._index.revoke(names[-1])
                for number in numbers:
                    del self._texts[number]

        return Reader(search, close)


def _by_tenant(passages: Sequence[Passage]) -> dict[str, Array]:
    found: dict[str, list[int]] = {}
    for number, passage in enumerate(passages):
        for tenant in dict.fromkeys(passage.tenants):
            found.setdefault(tenant, []).append(number)
    return {tenant: np.asarray(numbers, np.int64) for tenant, numbers in found.items()}


def _note(passages: Sequence[Passage], embedder: Embedder) -> str:
    """Return a digest of the passages, of who sees them and of the embedder's config."""
    digest = hashlib.sha256(repr(embedder.cfg).encode())
    for passage in passages:
        digest.update(repr(passage).encode())
    return digest.hexdigest()
