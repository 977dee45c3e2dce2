"""Schedules of pipelines: bubble and memory as stated, and no order of the same work that ends earlier."""

import itertools
from typing import Any

import pytest

from mesh.cost.schedules import Kind, Op, PipelineShape, idle_share, makespan, most_held, pipeline_orders, run_orders
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


@pytest.mark.parametrize("kind, stages, count", [("gpipe", 2, 2), ("1f1b", 2, 2), ("1f1b", 3, 2)])
def test_no_order_of_the_same_work_ends_earlier(kind: Any, stages: int, count: int):
    orders = pipeline_orders(kind, PipelineShape(stages, count, 1.0, 2.0))
    assert makespan(orders) == pytest.approx(best(orders))


@pytest.mark.parametrize("stages, count", [(2, 4), (4, 8), (4, 12), (3, 7)])
def test_bubbles_are_those_of_the_papers(stages: int, count: int):
    for kind in ("gpipe", "1f1b"):
        orders = pipeline_orders(kind, PipelineShape(stages, count))
        bubble = (stages - 1) / (count + stages - 1)
        assert list(idle_share(orders).values()) == pytest.approx([bubble] * stages)


@pytest.mark.parametrize("stages, count, chunks", [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 6, 3)])
def test_interleaved_bubbles_are_smaller_by_the_number_of_chunks(stages: int, count: int, chunks: int):
    orders = pipeline_orders("interleaved", PipelineShape(stages, count, 1.0, 2.0, chunks))
    assert makespan(orders) == pytest.approx(3 * count + 3 * (stages - 1) / chunks)  # Megatron-LM, 2.2


def test_one_forward_one_backward_holds_as_many_microbatches_as_stages_are_left():
    orders = pipeline_orders("1f1b", PipelineShape(4, 8))
    assert list(most_held(orders).values()) == [4, 3, 2, 1]
    assert set(most_held(pipeline_orders("gpipe", PipelineShape(4, 8))).values()) == {8}
    interleaved = most_held(pipeline_orders("interleaved", PipelineShape(4, 8, chunks=2)))
    assert list(interleaved.values()) == [11, 9, 7, 5]  # parts of half the layers: 2 (S - 1 - s) + (v - 1) S + 1


def test_every_layer_sees_every_microbatch_once_each_way_and_in_order():
    kinds: list[tuple[Kind, int]] = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
    for kind, chunks in kinds:
        orders = pipeline_orders(kind, PipelineShape(3, 6, chunks=chunks))
        times = run_orders(orders)
        assert len(times) == 2 * 6 * 3 * chunks
        for batch in range(6):
            way = [("F", part, batch) for part in range(3 * chunks)]
            way += [("B", part, batch) for part in reversed(range(3 * chunks))]
            assert all(times[a][1] <= times[b][0] + 1e-9 for a, b in itertools.pairwise(way))


def test_what_cannot_run_is_refused():
    with pytest.raises(UserError, match=r"\('a',\).*never begin"):
        run_orders({"one": [Op(("a",), 1.0, (("b",),))], "other": [Op(("b",), 1.0, (("a",),))]})
    with pytest.raises(UserError, match="chunks is 1; expected 2 or more"):
        pipeline_orders("interleaved", PipelineShape(2, 4))
    with pytest.raises(UserError, match="chunks is 2; expected 1 for gpipe"):
        pipeline_orders("gpipe", PipelineShape(2, 4, chunks=2))
    with pytest.raises(UserError, match="microbatches is 5; expected a multiple of the 2 stages"):
        pipeline_orders("interleaved", PipelineShape(2, 5, chunks=2))
