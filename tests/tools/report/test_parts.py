"""Parts of the report's pictures: scales, smoothing, spans."""

import pytest

from rl.audit.invariants import Finding
from tools.report import charts, headline, invariants, svg, timeline


def test_ticks_and_scales() -> None:
    assert svg.nice_ticks(0, 1, 5) == [0.0, 0.2, 0.4, pytest.approx(0.6), 0.8, 1.0]
    assert svg.nice_ticks(3, 3, 5) == [3]
    assert svg.log_ticks(1e-6, 1e-2, 10) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    assert svg.time_ticks(0, 260, 5) == [0, 60, 120, 180, 240]
    assert svg.Scale(1e-4, 1.0, 100, 0, log=True)(1e-2) == pytest.approx(50)
    assert svg.Scale(0, 1, 0, 10)(7) == 10, "values outside are clamped"
    assert svg.power_label(1e-4) == "10⁻⁴"


def test_smoothing_keeps_a_constant_and_has_no_lag() -> None:
    assert charts.moving_mean([(i, 2.0) for i in range(9)], 5) == [(i, 2.0) for i in range(9)]
    ramp = [(float(i), float(i)) for i in range(20)]
    assert charts.moving_mean(ramp, 5)[10] == (10.0, 10.0)
    assert charts.thin([(0, 1.0), (1, 3.0), (2, 9.0)], 2) == [(0.5, 2.0), (2.0, 9.0)]
    assert charts.thin([(0, 1.0), (1, 3.0), (2, 9.0)], 2, worst=True) == [(0.5, 3.0), (2.0, 9.0)]


def test_busy_counts_overlap_once_and_waiting_not() -> None:
    found = [
        timeline.Span("update", 0, 4),
        timeline.Span("push", 3, 5),
        timeline.Span("wait", 5, 10),
    ]
    assert timeline.busy(found, 0.0, 10.0) == pytest.approx(0.5)


def test_no_tile_stands_alone() -> None:
    for tiles in range(2, 40):
        side_by_side = headline.columns(tiles)
        assert side_by_side <= 6 and tiles % side_by_side != 1, tiles
    assert [headline.columns(tiles) for tiles in (1, 4, 6, 7, 13)] == [1, 4, 6, 4, 5]


def test_an_unknown_invariant_says_why() -> None:
    nothing = Finding("leases are granted once", 0)
    unseen = Finding("leases are granted once", 0, unchecked="events.jsonl is of an older version")
    assert [invariants.verdict(one) for one in (nothing, unseen)] == ["unknown", "unknown"]
    assert invariants.words(nothing) == ["this run has no fact that it could break: nothing to check"]
    assert invariants.words(unseen) == ["not checked: events.jsonl is of an older version"]
    assert invariants.words(Finding("leases are granted once", 3)) == []
