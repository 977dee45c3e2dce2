"""The model of events by which orders of work have times."""

import itertools

import pytest

from mesh.cost.schedules import Op, makespan, run_orders
from mesh.errors import UserError


def best(orders: dict[str, list[Op]]) -> float:
    """The least makespan of all orders of these operations on their resources, by brute force."""
    names = list(orders)
    found = float("inf")
    for picked in itertools.product(*(itertools.permutations(orders[name]) for name in names)):
        try:
            found = min(found, makespan(dict(zip(names, picked, strict=True))))
        except UserError:
            continue
    return found


def test_an_operation_waits_for_its_resource_and_for_others():
    orders = {"one": [Op(("a",), 2.0), Op(("b",), 1.0)], "other": [Op(("c",), 3.0, (("a",),)), Op(("d",), 1.0)]}
    times = run_orders(orders)
    assert times == {("a",): (0, 2), ("b",): (2, 3), ("c",): (2, 5), ("d",): (5, 6)} and makespan(orders) == 6
    assert best(orders) == 5  # "d" first


def test_what_cannot_run_is_refused():
    with pytest.raises(UserError, match=r"\('a',\).*never begin"):
        run_orders({"one": [Op(("a",), 1.0, (("b",),))], "other": [Op(("b",), 1.0, (("a",),))]})
