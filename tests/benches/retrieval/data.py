"""The job of `axl bench retrieval`: clustered vectors, tenants of Zipf sizes with documents in common, and queries.

Numpy and the standard library alone, and Python 3.11: peers import this file in environments of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
COUNT = 10  # documents of a query
SMALL = 0.01  # share of all documents up to which a tenant is one of few documents


@dataclass(frozen=True)
class RetrievalJob:
    """Sizes of the job.

    Attributes:
        documents: how many vectors there are.
        width: their numbers.
        tenants: how many tenants there are.
        sharing: tenants of a document, on average.
        clusters: Gaussian clusters that the vectors are drawn from.
        queries: queries of a round, of small and of large tenants each.
        seed: seed of everything.
    """

    documents: int = 200_000
    width: int = 64
    tenants: int = 1000
    sharing: float = 5.0
    clusters: int = 1000
    queries: int = 500
    seed: int = 0


@dataclass(frozen=True)
class RetrievalData:
    """Arrays of the job: float32 vectors [documents, width], documents by tenant, and queries.

    Attributes:
        vectors: float32 [documents, width].
        seen: ascending documents of each tenant.
        askers: tenant of each query; first those of small tenants, then as many of large ones.
        queries: float32 [queries, width].
        best: int64 [queries, COUNT], the nearest documents by float64.
    """

    vectors: Array
    seen: list[Array]
    askers: Array
    queries: Array
    best: Array


def make(job: RetrievalJob) -> RetrievalData:
    """Draw the job. Tenant n has a share of 1/n of what is granted; four fifths of it is from clusters of its own."""
    rng = np.random.default_rng(job.seed)
    centres = rng.normal(size=(job.clusters, job.width))
    labels = rng.integers(0, job.clusters, job.documents)
    vectors = (centres[labels] + 0.7 * rng.normal(size=(job.documents, job.width))).astype(np.float32)
    order, ranks = np.argsort(labels, kind="stable"), np.arange(1, job.tenants + 1)
    starts = np.searchsorted(labels[order], np.arange(job.clusters + 1))
    sizes = np.minimum(job.sharing * job.documents / ranks / np.sum(1 / ranks), 0.5 * job.documents).astype(int)
    seen: list[Array] = []
    for size in np.maximum(sizes, 2 * COUNT):
        own = rng.choice(job.clusters, min(job.clusters, 3 + size * job.clusters // job.documents * 3), replace=False)
        pool = np.concatenate([order[starts[one] : starts[one + 1]] for one in own])
        near = rng.choice(pool, min(size * 4 // 5, len(pool)), replace=False)
        seen.append(np.unique(np.concatenate([near, rng.choice(job.documents, size - len(near), replace=False)])))
    few = np.array([len(one) <= SMALL * job.documents for one in seen])
    askers = np.concatenate([rng.choice(np.flatnonzero(group), job.queries) for group in (few, ~few)])
    about = vectors[[rng.choice(seen[tenant]) for tenant in askers]]
    queries = (about + 0.35 * rng.normal(size=about.shape)).astype(np.float32)
    pairs = zip(askers, queries, strict=True)
    best = np.stack([seen[tenant][_nearest(vectors[seen[tenant]], query)] for tenant, query in pairs])
    return RetrievalData(vectors, seen, askers, queries, best)


def _nearest(vectors: Array, query: Array) -> Array:
    squares = ((vectors.astype(np.float64) - query) ** 2).sum(axis=1)
    return np.argsort(squares, kind="stable")[:COUNT]


def write(path: Path, data: RetrievalData) -> None:
    """Write the arrays for workers."""
    bounds = np.cumsum([0, *map(len, data.seen)])
    arrays = {"vectors": data.vectors, "askers": data.askers, "queries": data.queries, "best": data.best}
    np.savez(path, allow_pickle=False, rows=np.concatenate(data.seen), bounds=bounds, **arrays)


def read(path: Path) -> RetrievalData:
    """Return what was written."""
    with np.load(path) as found:
        rows, bounds = found["rows"], found["bounds"]
        seen = [rows[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
        return RetrievalData(found["vectors"], seen, found["askers"], found["queries"], found["best"])


def ask(data: RetrievalData, search: Callable[[int, Array], Array]) -> dict[str, float]:
    """Return microseconds of a query by the clock and of the CPU, and recall; queries come one at a time.

    Args:
        data: the job.
        search: returns documents for a tenant and a query.
    """
    half = len(data.askers) // 2
    figures: dict[str, float] = {}
    for name, part in (("small", slice(0, half)), ("large", slice(half, None))):
        pairs = list(zip(data.askers[part].tolist(), data.queries[part], strict=True))
        began, used = time.perf_counter(), time.process_time()
        found = [search(tenant, query) for tenant, query in pairs]
        figures[f"{name}_cpu_us"] = (time.process_time() - used) / len(pairs) * 1e6
        figures[f"{name}_us"] = (time.perf_counter() - began) / len(pairs) * 1e6
        hits = sum(len(np.intersect1d(got, best)) for got, best in zip(found, data.best[part], strict=True))
        figures[f"{name}_recall"] = hits / data.best[part].size
    return figures
