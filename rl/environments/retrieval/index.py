"""An index of vectors for many tenants, after Curator (arXiv:2401.07119): one tree of clusters, cut for each tenant.

A vector is stored once. A tenant has a list of the rows that it sees, ordered by the leaves of the tree; each node of
the tree is a range of that list, and the tenant's own tree is the cut of nodes with at most `shortlist` rows. A query
takes the shortlists with the nearest centroids. Other tenants' rows are never looked at, so none can be returned.

Tenants with few rows, and indices with few vectors, are searched exactly.
"""

import dataclasses
import math
import os
import threading
from collections.abc import Sequence

import numpy as np

from mesh.errors import UserError
from rl.environments.retrieval.clusters import Array, ClusterTree, cluster
from rl.environments.retrieval.membership import TenantFilters
from rl.environments.retrieval.state import EVERYONE, IndexState, View
from rl.environments.retrieval.storage import read_arrays, write_arrays


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """Sizes of an index."""

    tree_from: int = 20_000  # vectors from which there is a tree of clusters
    scan: int = 1536  # rows of a tenant that are compared with a query, which is exact for tenants with so few
    shortlist: int = 64  # rows of a tenant in a node that is not cut further
    seed: int = 0


class TenantIndex:
    """Vectors by squared Euclidean distance. Any number of threads may read while one at a time writes.

    A query sees the state of a moment; every method that changes something checks all of its arguments first.
    """

    def __init__(self, width: int, options: IndexOptions | None = None):
        """Make an empty index of vectors of `width` numbers."""
        self.width, self.options = width, options or IndexOptions()
        self._state = IndexState.empty(width)
        self._filters = TenantFilters(1)
        self._trained = 0  # documents at the last rebuild
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._state.sorted_ids)

    def insert(self, ids: Sequence[int] | Array, vectors: Array, tenants: Sequence[str] = ()) -> None:
        """Add documents that these tenants see; `"*"` is everyone. Without tenants nobody sees them yet.

        Args:
            ids: numbers of documents, 0 or more.
            vectors: [count, width] numbers.

        Raises:
            UserError: an id is taken, or the vectors are of another width or not finite. Nothing is added then.
        """
        numbers, made = _numbers(ids, "insert"), self._checked(vectors, "insert")
        if len(numbers) != len(made):
            raise UserError(f"insert: {len(numbers)} ids for {len(made)} vectors; expected as many")
        names = [_name(tenant) for tenant in tenants]
        with self._lock:
            state = self._state
            if len(taken := np.intersect1d(numbers, state.sorted_ids)) or len(np.unique(numbers)) < len(numbers):
                raise UserError(f"insert: document {taken[0] if len(taken) else 'of one id'} is there twice")
            if state.used + len(numbers) > len(state.ids):
                state = state.regrown(len(numbers))
            rows = np.arange(state.used, state.used + len(numbers), dtype=np.int32)
            state.vectors[rows], state.halves[rows] = made, 0.5 * np.einsum("nd,nd->n", made, made)
            state.ids[rows] = numbers
            state.places[rows] = 0 if state.tree is None else state.tree.place(made)
            order = np.argsort(numbers)
            at = np.searchsorted(state.sorted_ids, numbers[order])
            sorted_ids = np.insert(state.sorted_ids, at, numbers[order])
            sorted_rows = np.insert(state.sorted_rows, at, rows[order])
            used = state.used + len(rows)
            self._state = dataclasses.replace(state, used=used, sorted_ids=sorted_ids, sorted_rows=sorted_rows)
            for name in names:
                self._see(name, rows)
            if len(self) >= max(self.options.tree_from, 2 * self._trained):
                self.rebuild()

    def delete(self, ids: Sequence[int] | Array) -> None:
        """Remove documents, from all tenants (UserError: there is no such document; nothing is removed then)."""
        with self._lock:
            state = self._state
            rows = state.find(numbers := np.unique(_numbers(ids, "delete")), "delete")
            for tenant in self._filters.candidates(state.places[rows].tolist()):
                self._unsee(tenant, rows)
            kept = ~np.isin(state.sorted_ids, numbers)
            ids, left = state.sorted_ids[kept], state.sorted_rows[kept]
            self._state = dataclasses.replace(state, sorted_ids=ids, sorted_rows=left)
            if self._state.used > 1024 + 1.5 * len(self):
                self._publish(self._state.compacted(self._state.tree))

    def grant(self, tenant: str, ids: Sequence[int] | Array) -> None:
        """Show documents to a tenant too, `"*"`: to everyone (UserError: there is no such one; nothing is granted)."""
        with self._lock:
            self._see(_name(tenant), self._state.find(np.unique(_numbers(ids, "grant")), "grant"))

    def revoke(self, tenant: str, ids: Sequence[int] | Array | None = None) -> None:
        """Hide documents, or all, from a tenant; everyone's stay visible (UserError: no such one; nothing changes)."""
        with self._lock:
            if ids is None:
                self._state.views.pop(tenant, None)
                return
            self._unsee(tenant, self._state.find(np.unique(_numbers(ids, "revoke")), "revoke"))

    def search(self, query: Array, tenants: str | Sequence[str], count: int) -> tuple[Array, Array]:
        """Return the ids of the nearest documents that a tenant sees, and squared distances; among equals by id.

        Args:
            query: [width] numbers.
            tenants: the name, or names such as a user's and a task's; documents of everyone are always seen.
            count: documents to return; fewer where fewer are seen.

        Raises:
            UserError: the query is of another width or not finite.
        """
        vector = np.asarray(query, np.float32)
        if vector.shape != (self.width,) or not math.isfinite(square := float(vector.dot(vector))):
            self._checked(vector[None], "search")
            raise UserError("search: a query whose squared length is no float32 number; expected a shorter one")
        state, options = self._state, self.options
        limits = options.scan, options.shortlist
        names = (tenants, EVERYONE) if isinstance(tenants, str) else (*tenants, EVERYONE)
        views = [view for view in map(state.views.get, names) if view is not None and len(view.rows)]
        found = [state.nearest(view, vector, count, limits) for view in views]
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        rows, distances = found[0]
        if len(found) > 1:
            rows, first = np.unique(np.concatenate([rows for rows, _ in found]), return_index=True)
            distances = np.concatenate([distances for _, distances in found])[first]
            order = np.lexsort((state.ids[rows], distances))[:count]
            rows, distances = rows[order], distances[order]
        return state.ids.take(rows), np.maximum(2.0 * distances + square, 0.0)

    def check(self, document: int, tenants: str | Sequence[str]) -> None:
        """Refuse a document that these tenants do not see, with the same words as one that is not there (UserError)."""
        state, names = self._state, (tenants,) if isinstance(tenants, str) else tuple(tenants)
        at = int(np.searchsorted(state.sorted_ids, document))
        if at < len(state.sorted_ids) and state.sorted_ids[at] == document:
            row = state.sorted_rows[at : at + 1]
            if any(state.sees(name, row)[0] for name in (*names, EVERYONE)):
                return
        raise UserError(f"document {document}: tenant {' or '.join(map(repr, names))} has no such document")

    def rebuild(self) -> None:
        """Cluster the vectors again, if there are enough, and drop what was deleted; readers go on."""
        with self._lock:
            state = self._state
            tree, rows = None, state.sorted_rows
            if len(rows) >= self.options.tree_from:
                tree = cluster(state.vectors[rows], self.options.seed)
            self._trained = len(rows)
            self._publish(state.compacted(tree))

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the arrays: of the vectors, the tree, the tenants' lists, and all else."""
        state = self._state
        tree = 0 if (one := state.tree) is None else one.centroids.nbytes + one.children.nbytes + one.spans.nbytes
        others = (state.halves, state.ids, state.places, state.sorted_ids, state.sorted_rows)
        lists = sum(view.nbytes for view in state.views.values())
        rest = sum(each.nbytes for each in others) + self._filters.nbytes
        return {"vectors": state.vectors.nbytes, "tree": tree, "tenants": lists, "rest": rest}

    def save(self, path: str | os.PathLike[str], note: str = "") -> None:
        """Write the index, whole or not at all (OSError); `note`: what it is of, for which `load` asks."""
        with self._lock:
            state, trained = self._state, self._trained
            views = dict(state.views)
        about = {"width": self.width, "options": dataclasses.asdict(self.options), "note": note, "trained": trained}
        arrays = {name: getattr(state, name)[: state.used] for name in ("vectors", "halves", "ids", "places")}
        arrays |= {"sorted_ids": state.sorted_ids, "sorted_rows": state.sorted_rows}
        if state.tree is not None:
            arrays |= {name: getattr(state.tree, name) for name in ("centroids", "children", "spans")}
        arrays["bounds"] = np.cumsum([0, *(len(view.rows) for view in views.values())])
        arrays["rows"] = np.concatenate([state.sorted_rows[:0], *(view.rows for view in views.values())])
        write_arrays(path, about | {"tenants": list(views)}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], note: str = "") -> "TenantIndex":
        """Return the index of a file (UserError: damaged, none, or not of `note`; OSError: it cannot be read)."""
        about, arrays = read_arrays(path)
        if about["note"] != note:
            raise UserError(f"{path} is an index of {about['note']!r}; expected one of {note!r}")
        made = cls(about["width"], IndexOptions(**about["options"]))
        bounds, rows = arrays.pop("bounds"), arrays.pop("rows")
        views = {name: View(rows[a:b]) for name, a, b in zip(about["tenants"], bounds, bounds[1:], strict=False)}
        parts = [arrays.pop(name) for name in ("centroids", "children", "spans") if name in arrays]
        tree = ClusterTree(*parts) if parts else None
        made._state = IndexState(used=len(arrays["ids"]), tree=tree, views=views, **arrays)
        made._trained = about["trained"]
        made._refilter()
        return made

    # ---- parts of changes, under the lock

    def _see(self, tenant: str, rows: Array) -> None:
        state = self._state
        rows = rows[~state.sees(tenant, rows)]
        if not len(rows):
            return
        rows = rows[np.argsort(state.keys(rows))]
        held = view.rows if (view := state.views.get(tenant)) is not None else rows[:0]
        at = np.searchsorted(state.keys(held), state.keys(rows))
        self._filters.add(tenant, state.places[rows])
        state.views[tenant] = View(np.insert(held, at, rows))

    def _unsee(self, tenant: str, rows: Array) -> None:
        view = self._state.views.get(tenant)
        if view is not None and len(kept := view.rows[~np.isin(view.rows, rows)]) < len(view.rows):
            self._state.views[tenant] = View(kept)

    def _publish(self, state: IndexState) -> None:
        self._state = state
        self._refilter()

    def _refilter(self) -> None:
        state = self._state
        self._filters = TenantFilters(1 if state.tree is None else state.tree.leaves)
        for name, view in state.views.items():
            self._filters.add(name, state.places[view.rows])

    def _checked(self, vectors: Array, what: str) -> Array:
        made = np.ascontiguousarray(vectors, np.float32)
        if made.ndim != 2 or made.shape[1] != self.width:
            raise UserError(f"{what}: vectors of shape {made.shape}; expected a width of {self.width}")
        if not np.isfinite(made).all():
            row = int(np.flatnonzero(~np.isfinite(made).all(axis=1))[0])
            raise UserError(f"{what}: vector {row} has NaN or infinite numbers; expected finite ones")
        return made


def _numbers(ids: Sequence[int] | Array, what: str) -> Array:
    numbers = np.asarray(ids)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu") or (numbers.size and numbers.min() < 0):
        raise UserError(f"{what}: ids {numbers!r:.60}; expected a sequence of whole numbers, 0 or more")
    return numbers.astype(np.int64)


def _name(tenant: str) -> str:
    if not isinstance(tenant, str) or not tenant:
        raise UserError(f"tenant {tenant!r}; expected a name, or '*' for everyone")
    return tenant
