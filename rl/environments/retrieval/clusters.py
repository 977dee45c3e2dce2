"""A tree of clusters of vectors: hierarchical k-means, whose leaves are numbered so that each node spans a range."""

import dataclasses
import functools
from typing import Any

import numpy as np

BRANCHES = 16  # limit of children of a node
LEAF = 48  # limit of vectors of a node without children
DEPTH = 8
_ROUNDS = 6  # passes of k-means
_SAMPLE = 48  # training vectors of k-means for each centroid
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class ClusterTree:
    """Nodes in order of breadth; the root is node 0 and the children of a node lie side by side."""

    centroids: Array  # float32 [nodes, width]
    children: Array  # int32 [nodes, 2], the first child and one past the last; equal for a leaf
    spans: Array  # int32 [nodes, 2], the leaves below a node, numbered from the left: the first and one past the last

    @functools.cached_property
    def halves(self) -> Array:
        """Return half the squared lengths of the centroids, float32."""
        return 0.5 * np.einsum("nd,nd->n", self.centroids, self.centroids)

    @property
    def leaves(self) -> int:
        """Return how many leaves there are."""
        return int(self.spans[0, 1])

    def place(self, vectors: Array) -> Array:
        """Return the leaf number, int32, of vectors [count, width]: always to the child with the nearest centroid."""
        places = np.zeros(len(vectors), np.int32)
        waiting = [(0, np.arange(len(vectors)))]
        while waiting:
            node, members = waiting.pop()
            first, last = self.children[node]
            if first == last:
                places[members] = self.spans[node, 0]
                continue
            nearest = _nearest(vectors[members], self.centroids[first:last])
            waiting += [(first + n, members[nearest == n]) for n in np.unique(nearest)]
        return places

    def frontier(self, places: Array, most: int) -> tuple[Array, Array]:
        """Return the nodes that cut a tenant's vectors into shortlists, from left to right, and the bounds of each.

        A node is cut further while it has children and more than `most` of the vectors: a tenant's tree is deep where
        the tenant is dense. The cut depends on nothing but the vectors' leaves.

        Args:
            places: int32 [count], leaf numbers in ascending order.
            most: vectors of a shortlist, more only in a leaf.

        Returns:
            int32 [shortlists] nodes, and int64 [shortlists + 1] bounds in `places`.
        """
        done: list[Array] = []
        nodes = np.zeros(1, np.int32)
        while len(nodes):
            low, high = np.searchsorted(places, self.spans[nodes].T.astype(places.dtype))
            count, (first, last) = high - low, self.children[nodes].T
            whole = (count <= most) | (first == last)
            done.append(nodes[whole & (count > 0)])
            first, last = first[~whole], last[~whole]
            nodes = ranges(first, last).astype(np.int32)
        cut = np.concatenate(done)
        cut = cut[np.argsort(self.spans[cut, 0])]
        return cut, np.append(np.searchsorted(places, self.spans[cut, 0].astype(places.dtype)), len(places))


def ranges(first: Array, last: Array) -> Array:
    """Return the numbers of half-open ranges, one range after another, without a loop; int64."""
    counts = last - first
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - (ends - counts), counts)


def cluster(vectors: Array, seed: int) -> ClusterTree:
    """Return the tree of these vectors, float32 [count, width]; the same for the same order and seed."""
    rng = np.random.default_rng(seed)
    centroids = [vectors.mean(axis=0, keepdims=True)]
    children: list[tuple[int, int]] = []
    nodes, waiting = 1, [(np.arange(len(vectors)), 0)]
    for members, depth in waiting:  # grows: children are appended, and the nodes come in order of breadth
        made = _split(vectors, members, rng) if len(members) > LEAF and depth < DEPTH else None
        count = 0 if made is None else len(made[0])
        children.append((nodes, nodes + count))
        if made is not None:
            centroids.append(made[0])
            waiting += [(members[made[1] == n], depth + 1) for n in range(count)]
        nodes += count
    kids = np.asarray(children, np.int32)
    return ClusterTree(np.concatenate(centroids).astype(np.float32), kids, _spans(kids))


def _split(vectors: Array, members: Array, rng: np.random.Generator) -> tuple[Array, Array] | None:
    """Return centroids of the members and the number of the nearest for each; None where they are all alike."""
    branches = min(BRANCHES, max(2, len(members) // (LEAF // 2)))
    sample = members if len(members) <= branches * _SAMPLE else rng.choice(members, branches * _SAMPLE, replace=False)
    points = vectors[sample]
    centroids = np.unique(points[rng.choice(len(points), branches, replace=False)], axis=0)
    for _ in range(_ROUNDS):
        nearest = _nearest(points, centroids)
        counts = np.bincount(nearest, minlength=len(centroids))
        members_of = (np.arange(len(centroids))[:, None] == nearest).astype(np.float32)
        centroids = (members_of @ points / np.maximum(counts, 1)[:, None].astype(np.float32))[counts > 0]
    nearest = _nearest(vectors[members], centroids)
    used, nearest = np.unique(nearest, return_inverse=True)
    return (centroids[used], nearest) if len(used) > 1 else None


def _spans(children: Array) -> Array:
    """Return the range of leaves below each node: counted from the last node up, numbered from the first down."""
    counts = np.ones(len(children), np.int64)
    for node in range(len(children) - 1, -1, -1):
        first, last = children[node]
        if first < last:
            counts[node] = counts[first:last].sum()
    starts = np.zeros(len(children), np.int64)
    for node, (first, last) in enumerate(children):
        starts[first:last] = starts[node] + np.cumsum(counts[first:last]) - counts[first:last]
    return np.stack([starts, starts + counts], axis=1).astype(np.int32)


def _nearest(vectors: Array, centroids: Array) -> Array:
    """Return the number of the nearest centroid of each vector."""
    squares = np.einsum("nd,nd->n", centroids, centroids)
    return np.argmin(squares - 2.0 * (vectors @ centroids.T), axis=1)
