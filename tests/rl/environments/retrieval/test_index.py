"""The index for many tenants against brute force: whatever was done to it, and while it is done."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh import UserError
from rl.environments.retrieval.clusters import cluster
from rl.environments.retrieval.index import IndexOptions, TenantIndex

SMALL = IndexOptions(tree_from=60, scan=8, shortlist=4)
TENANTS = ("ann", "bob", "eve", "*")
Array = np.ndarray[Any, Any]


def points(count: int, width: int = 3, seed: int = 0) -> Array:
    """Return whole numbers, whose distances are exact in float32 and often equal."""
    return np.random.default_rng(seed).integers(-9, 10, (count, width)).astype(np.float32)


def brute(vectors: dict[int, Array], seen: set[int], query: Array, count: int) -> list[tuple[float, int]]:
    return sorted((float(((vectors[n] - query).astype(np.float64) ** 2).sum()), n) for n in seen)[:count]


def found(index: TenantIndex, query: Array, tenants: Any, count: int) -> list[tuple[float, int]]:
    ids, distances = index.search(query, tenants, count)
    return list(zip(distances.tolist(), ids.tolist(), strict=True))


def filled(index: TenantIndex, vectors: dict[int, Array], access: dict[str, set[int]]) -> TenantIndex:
    numbers = sorted(vectors)
    index.insert(numbers, np.stack([vectors[n] for n in numbers]))
    for tenant, seen in access.items():
        if seen:
            index.grant(tenant, sorted(seen))
    return index


OPERATION = st.tuples(st.sampled_from(["insert", "delete", "grant", "revoke", "rebuild"]), st.integers(0, 2**31))


def play(index: TenantIndex, operations: list[tuple[str, int]]) -> tuple[dict[int, Array], dict[str, set[int]]]:
    """Carry operations out; return what should then be there."""
    vectors: dict[int, Array] = {}
    access: dict[str, set[int]] = {tenant: set() for tenant in TENANTS}
    for number, (name, seed) in enumerate([("insert", 5), ("insert", 6), *operations]):
        rng = np.random.default_rng(seed)
        tenant = TENANTS[seed % 4]
        some = rng.choice(sorted(vectors), len(vectors) // 3, replace=False).tolist() if vectors else []
        if name == "insert":
            made = points(40, seed=seed)
            fresh = (1000 * number + rng.permutation(40)).tolist()
            index.insert(fresh, made, [tenant])
            vectors |= dict(zip(fresh, made, strict=True))
            access[tenant] |= set(fresh)
        elif name == "rebuild":
            index.rebuild()
        elif some:
            if name == "delete":
                index.delete(some)
                vectors = {n: v for n, v in vectors.items() if n not in some}
                access = {t: seen - set(some) for t, seen in access.items()}
            elif name == "grant":
                index.grant(tenant, some)
                access[tenant] |= set(some)
            else:
                index.revoke(tenant, some)
                access[tenant] -= set(some)
    return vectors, access


@settings(max_examples=25, deadline=None)
@given(st.lists(OPERATION, max_size=8))
def test_any_history_finds_what_a_new_index_finds(operations: list[tuple[str, int]]):
    index = TenantIndex(3, SMALL)
    vectors, access = play(index, operations)
    assert len(index) == len(vectors)
    index.rebuild()
    new = filled(TenantIndex(3, SMALL), vectors, access)
    new.rebuild()
    exact = filled(TenantIndex(3), vectors, access)
    for query in points(12, seed=1) + 0.5:
        for tenants in ("ann", ("bob", "eve"), "nobody", ()):
            names = (tenants,) if isinstance(tenants, str) else tenants
            seen = set().union(access["*"], *(access.get(name, set()) for name in names))
            got = found(index, query, tenants, 5)
            assert got == found(new, query, tenants, 5)
            assert {number for _, number in got} <= seen
            assert found(exact, query, tenants, 5) == brute(vectors, seen, query, 5)


@settings(max_examples=15, deadline=None)
@given(st.lists(OPERATION.filter(lambda one: one[0] != "rebuild"), max_size=8))
def test_changes_under_one_tree_leave_what_filling_it_at_once_leaves(operations: list[tuple[str, int]]):
    """The tree is of the first documents in both; one then has the changes, the other the documents they leave."""
    options = dataclasses.replace(SMALL, tree_from=60)
    first = {100_000 + n: vector for n, vector in enumerate(points(60, seed=9))}
    one, other = (filled(TenantIndex(3, options), first, {}) for _ in range(2))
    for index in (one, other):
        index._trained = 10**6  # no second tree
    vectors, access = play(one, operations)
    one.delete(sorted(first))
    filled(other, vectors, access)
    other.delete(sorted(first))
    for query in points(12, seed=1):
        for tenant in TENANTS:
            assert found(one, query, tenant, 5) == found(other, query, tenant, 5)


def test_shortlists_cover_all_documents_of_a_tenant_once_and_are_small():
    tree = cluster(vectors := np.random.default_rng(0).normal(size=(3000, 8)).astype(np.float32), 0)
    places = np.sort(tree.place(vectors)[::3])
    nodes, bounds = tree.frontier(places, 20)
    assert bounds[0] == 0 and bounds[-1] == len(places) and (np.diff(bounds) > 0).all() and len(nodes) > 50
    for node, first, last in zip(nodes, bounds, bounds[1:], strict=False):
        low, high = tree.spans[node]
        assert ((places[first:last] >= low) & (places[first:last] < high)).all()
        leaf = tree.children[node, 0] == tree.children[node, 1]
        assert last - first <= 20 or leaf
    leaves = np.flatnonzero(tree.children[:, 0] == tree.children[:, 1])
    assert sorted(tree.spans[leaves, 0]) == list(range(tree.leaves))


def test_large_tenants_are_searched_in_part_and_well():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(100, 16))
    vectors = (centres[rng.integers(0, 100, 12_000)] + 0.5 * rng.normal(size=(12_000, 16))).astype(np.float32)
    index = TenantIndex(16, IndexOptions(tree_from=5000))
    index.insert(np.arange(12_000), vectors)
    seen = np.sort(rng.choice(12_000, 6000, replace=False))
    index.grant("ann", seen)
    hits = 0
    for query in vectors[rng.choice(seen, 100)] + 0.2 * rng.normal(size=(100, 16)).astype(np.float32):
        best = seen[np.argsort(((vectors[seen] - query) ** 2).sum(axis=1))[:10]]
        hits += len(np.intersect1d(best, index.search(query, "ann", 10)[0]))
    assert hits / 1000 >= 0.95


def test_a_file_has_the_index_to_the_bit(tmp_path: Path):
    index = TenantIndex(3, SMALL)
    play(index, [("grant", 1), ("delete", 2), ("insert", 3), ("revoke", 5), ("grant", 7)])
    path = tmp_path / "index"
    index.save(path, "note")
    again = TenantIndex.load(path, "note")
    for change in (
        lambda one: None,
        lambda one: one.delete([0, 1]),
        lambda one: one.insert([7777], points(1), ["bob"]),
    ):
        change(index)
        change(again)
        for query in points(20, seed=3):
            for tenant in TENANTS:
                assert found(index, query, tenant, 6) == found(again, query, tenant, 6)
    with pytest.raises(UserError, match="index of 'note'; expected one of 'other'"):
        TenantIndex.load(path, "other")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        TenantIndex.load(path, "note")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="is no index"):
        TenantIndex.load(tmp_path / "text")
    again.save(path, "note")  # over the damaged one
    assert (
        len(TenantIndex.load(path, "note")) == len(again)
        and [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []
    )


def test_what_is_refused_changes_nothing():
    index = filled(TenantIndex(3, SMALL), dict(enumerate(points(80))), {"ann": {1, 2, 3}, "bob": {4}})
    before = {tenant: found(index, points(1)[0], tenant, 9) for tenant in TENANTS}
    nan = points(2)
    nan[1, 1] = np.nan
    refused = [
        (lambda: index.insert([100, 101], nan, ["ann"]), "vector 1 has NaN"),
        (lambda: index.insert([100], points(1, 4), ["ann"]), r"shape \(1, 4\); expected a width of 3"),
        (lambda: index.insert([100, 100], points(2), ["ann"]), "there twice"),
        (lambda: index.insert([100, 4], points(2), ["ann"]), "document 4 is there twice"),
        (lambda: index.insert([100, 101], points(1), ["ann"]), "2 ids for 1 vectors"),
        (lambda: index.insert([-1], points(1), ["ann"]), "0 or more"),
        (lambda: index.insert([100], points(1), ["ann", ""]), "expected a name"),
        (lambda: index.grant("ann", [4, 999]), "no document 999"),
        (lambda: index.delete([4, 999]), "no document 999"),
        (lambda: index.revoke("ann", [1, 999]), "no document 999"),
        (lambda: index.search(points(1, 2)[0], "ann", 3), "expected a width of 3"),
        (lambda: index.search(nan[1], "ann", 3), "NaN"),
    ]
    for attempt, message in refused:
        with pytest.raises(UserError, match=message):
            attempt()
    assert len(index) == 80
    assert before == {tenant: found(index, points(1)[0], tenant, 9) for tenant in TENANTS}


def test_a_foreign_document_is_refused_in_the_words_of_one_that_is_not_there():
    index = filled(TenantIndex(3), dict(enumerate(points(9))), {"ann": {1}, "bob": {2}, "*": {3}})
    for number, tenants in ((1, "ann"), (3, "ann"), (2, ("ann", "bob"))):
        index.check(number, tenants)
    for number in (2, 5, 77):
        with pytest.raises(UserError, match=f"^document {number}: tenant 'ann' has no such document$"):
            index.check(number, "ann")
    index.revoke("ann")
    with pytest.raises(UserError, match="document 1: tenant 'ann'"):
        index.check(1, ["ann"])


@pytest.mark.slow
def test_readers_see_their_own_documents_alone_while_a_writer_changes_all():
    """Document n belongs to tenant n % 4, at all times; versions of a document differ by their vectors."""
    index = TenantIndex(3, SMALL)
    stop, errors = threading.Event(), []

    def read(tenant: int) -> None:
        rng = np.random.default_rng(tenant)
        try:
            while not stop.is_set():
                ids, distances = index.search(rng.normal(size=3), str(tenant), 5)
                assert (ids % 4 == tenant).all() and (np.diff(distances) >= -1e-5).all() and len(set(ids)) == len(ids)
                reads[tenant] += 1
        except BaseException as error:
            errors.append(error)

    reads = [0] * 4
    threads = [threading.Thread(target=read, args=(tenant,)) for tenant in range(4)]
    for thread in threads:
        thread.start()
    try:
        rng, held = np.random.default_rng(9), np.zeros(0, np.int64)
        for step in range(150):
            tenant = step % 4
            fresh = 4 * (50 * step + np.arange(50)) + tenant
            index.insert(fresh, points(50, seed=step), [str(tenant)])
            held = np.append(held, fresh)
            dropped = rng.choice(held, min(len(held) // 4, 60), replace=False)
            index.delete(dropped)
            held = np.setdiff1d(held, dropped)
            if step % 20 == 19:
                index.rebuild()
        while min(reads) < 20 and not errors:
            pass
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    assert errors == [] and len(index) == len(held)


def test_filters_of_leaves_name_all_whom_a_deletion_concerns():
    index = TenantIndex(3, SMALL)
    index.insert(np.arange(200), points(200))
    for tenant in range(60):
        index.grant(f"t{tenant}", np.arange(tenant, 200, 60))
    index.delete(np.arange(0, 200, 2))
    for tenant in range(60):
        left = [n for n in range(tenant, 200, 60) if n % 2]
        assert sorted(index.search(np.zeros(3), f"t{tenant}", 99)[0]) == left
