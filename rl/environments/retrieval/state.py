"""Arrays as a reader of the index sees them, never overwritten where it may look, and views of tenants."""

import dataclasses

import numpy as np

from mesh.errors import UserError
from rl.environments.retrieval.clusters import Array, ClusterTree, ranges

EVERYONE = "*"  # the tenant whose documents all tenants see


class View:
    """Documents that one tenant sees: replaced by a change, never changed. `rows` is ordered by leaf, then by row."""

    __slots__ = ("_cut", "rows")

    def __init__(self, rows: Array):
        self.rows = rows
        self._cut: tuple[Array, Array] | None = None

    def shortlists(self, state: "IndexState", most: int) -> tuple[Array, Array]:
        """Return the nodes and bounds of the tenant's shortlists, found at the first query after a change."""
        cut = self._cut
        if cut is None:
            assert state.tree is not None
            self._cut = cut = state.tree.frontier(state.places[self.rows], most)
        return cut

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays."""
        return self.rows.nbytes + sum(part.nbytes for part in self._cut or ())


@dataclasses.dataclass(frozen=True)
class IndexState:
    """One generation of arrays. Rows below `used` are final; a new generation has arrays and views of its own."""

    vectors: Array  # float32 [capacity, width]
    halves: Array  # float32 [capacity], half their squared lengths
    ids: Array  # int64 [capacity]; a deleted one stays, in no view
    places: Array  # int32 [capacity], leaf numbers; 0 without a tree
    used: int  # rows that are taken
    tree: ClusterTree | None  # None while all queries are exact
    views: dict[str, View]  # views by tenant; each is replaced as a whole
    sorted_ids: Array  # int64 [documents], ascending
    sorted_rows: Array  # int32 [documents], their rows

    @classmethod
    def empty(cls, width: int) -> "IndexState":
        """Return the state of no documents."""
        ids, rows = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(np.zeros((0, width), np.float32), np.zeros(0, np.float32), ids, rows, 0, None, {}, ids, rows)

    def find(self, ids: Array, what: str) -> Array:
        """Return the rows of these ids (UserError: there is no such document)."""
        at = np.searchsorted(self.sorted_ids, ids)
        known = at < len(self.sorted_ids)
        known[known] = self.sorted_ids[at[known]] == ids[known]
        if not known.all():
            raise UserError(f"{what}: there is no document {ids[~known][0]}; expected ids that were inserted")
        return self.sorted_rows[at]

    def keys(self, rows: Array) -> Array:
        """Return numbers that order rows by leaf, then by row."""
        return (self.places[rows].astype(np.int64) << 32) | rows

    def sees(self, tenant: str, rows: Array) -> Array:
        """Return for each row whether a tenant sees it, bool; documents shared with everyone are not looked at."""
        view = self.views.get(tenant)
        if view is None or not len(view.rows):
            return np.zeros(len(rows), bool)
        keys, wanted = self.keys(view.rows), self.keys(rows)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return keys[at] == wanted

    def nearest(self, view: View, query: Array, count: int, limits: tuple[int, int]) -> tuple[Array, Array]:
        """Return the rows of a view nearest to a query, and half their squared distances, less half the query's square.

        Args:
            query: float32 [width].
            count: rows to return.
            limits: rows that are compared, all of a view with so few; rows of a shortlist.
        """
        rows, scan, shortlist = view.rows, max(limits[0], 4 * count), limits[1]
        if self.tree is not None and len(rows) > scan:
            rows = self._candidates(view, query, scan, shortlist)
        distances = self.halves.take(rows) - np.vecdot(self.vectors.take(rows, axis=0), query)
        if len(rows) > count:
            ordered = distances.copy()
            ordered.partition(count - 1)
            near = (distances <= ordered[count - 1]).nonzero()[0]  # equal ones are told apart by their ids
            rows, distances = rows.take(near), distances.take(near)
        order = np.lexsort((self.ids.take(rows), distances))[:count]
        return rows.take(order), distances.take(order)

    def _candidates(self, view: View, query: Array, scan: int, shortlist: int) -> Array:
        """Return rows of the nearest shortlists, the best first, until there are `scan`."""
        assert self.tree is not None
        nodes, bounds = view.shortlists(self, shortlist)
        centroids = self.tree.centroids.take(nodes, axis=0)
        near = np.argsort(self.tree.halves.take(nodes) - np.vecdot(centroids, query), kind="stable")
        enough = int(np.searchsorted(np.cumsum((bounds[1:] - bounds[:-1])[near]), scan)) + 1
        near = near[:enough]
        return view.rows[ranges(bounds[near], bounds[near + 1])]

    def regrown(self, more: int) -> "IndexState":
        """Return this with room for more rows, an eighth beyond what is needed; views are apart from then on."""
        capacity = self.used + more + (self.used // 8 + 64 if self.used else 0)
        arrays: dict[str, Array] = {}
        for name in ("vectors", "halves", "ids", "places"):
            old = getattr(self, name)
            arrays[name] = np.zeros((capacity, *old.shape[1:]), old.dtype)
            arrays[name][: self.used] = old[: self.used]
        return dataclasses.replace(self, views=dict(self.views), **arrays)

    def compacted(self, tree: ClusterTree | None) -> "IndexState":
        """Return the documents alone, in the order of a tree's leaves and of their ids: history leaves no trace."""
        rows = self.sorted_rows
        vectors, ids = self.vectors[rows], self.ids[rows]
        places = np.zeros(len(rows), np.int32) if tree is None else tree.place(vectors)
        order = np.argsort(places, kind="stable")  # the rows come in the order of ids
        moved = np.full(self.used, -1, np.int32)
        moved[rows[order]] = np.arange(len(rows), dtype=np.int32)
        views = {name: View(np.sort(moved[view.rows])) for name, view in self.views.items()}
        arrays = vectors[order], self.halves[rows[order]], ids[order], places[order]
        return IndexState(*arrays, len(rows), tree, views, ids, moved[rows])
