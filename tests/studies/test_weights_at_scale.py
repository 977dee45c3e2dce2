"""The calculator of docs/benchmarks/weights-at-scale.md: its page is up to date, its sums can be checked."""

import pytest
from click.testing import CliRunner

from tests.studies import weights_at_scale, weights_model
from tests.studies.broadcast_simulation import simulate
from tests.studies.weights_at_scale import DOC, binding
from tests.studies.weights_model import CASES, GB, pipelined, pull_bounds, push_bounds, readers_within

V5P_32B, V5P_671B = CASES[0], CASES[3]


def test_the_page_shows_what_the_tool_prints() -> None:
    page = DOC.read_text()
    assert weights_at_scale.with_tables(page) == page, "run: python -m tests.studies.weights_at_scale --markdown"


def test_command_prints_the_tables_and_says_that_nothing_was_measured() -> None:
    result = CliRunner().invoke(weights_at_scale.main)
    assert result.exit_code == 0
    sections = result.output.split("### ")[1:]
    assert len(sections) == 8
    assert all("not measured" in section for section in sections[1:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_byte_is_lost_and_two_versions_fit(case: weights_model.Case) -> None:
    assert case.pushed * case.trainer_hosts == pytest.approx(case.total)
    assert case.share * case.worker_hosts == pytest.approx(case.total)
    assert 2 * case.share / case.host.chips < case.host.hbm
    assert 2 * case.share < case.host.memory


def test_bounds_by_hand() -> None:
    """65.6 GB on a v5p host: 25 GB/s of NIC, four chips of 15 GB/s; 8 server hosts of 25 GB/s."""
    bounds = pull_bounds(V5P_32B)
    assert bounds["worker NIC"] == pytest.approx(65.6 / 25)
    assert bounds["PCIe"] == pytest.approx(65.6 / 60)
    assert bounds["server NIC"] == pytest.approx(65.6 / 200)
    assert binding(bounds) == "2.6 s (worker NIC)"
    assert binding(push_bounds(V5P_671B)) == "1.7 s (server NIC)"
    assert V5P_671B.share == pytest.approx(1342 * GB / 16)


def test_a_delta_moves_fewer_bytes_over_nics_and_the_same_over_pcie() -> None:
    dense, delta = pull_bounds(V5P_32B), pull_bounds(V5P_32B, ratio=10, codec=True)
    for part in ("worker NIC", "server NIC"):
        assert delta[part] == pytest.approx(dense[part] / 10)
    assert delta["PCIe"] == dense["PCIe"]
    assert delta["decode"] == pytest.approx(weights_model.DECODE * 65.6 / 104)
    assert delta["encode"] == pytest.approx(weights_model.ENCODE * 65.6 / 8 / 88)
    assert dense["decode"] == dense["encode"] == 0.0


def test_a_broadcast_stops_where_the_next_doubling_does_not_fit() -> None:
    assert [readers_within(limit, transfer=1.0, first=1.0) for limit in (0.9, 1, 1.9, 2, 4)] == [
        "0",
        "1",
        "1",
        "2",
        "8",
    ]
    assert readers_within(4.0, transfer=1.0, first=2.0) == "4"
    for readers, limit in ((8, 4), (9, 5), (1024, 11)):
        assert simulate(readers, fanout=1).finished == pytest.approx(limit)


def test_more_seeds_save_doublings_and_cost_copies() -> None:
    outcome = simulate(128, fanout=1, seeds=8, server_egress=8)
    assert outcome.finished == pytest.approx(5) and outcome.server_copies == pytest.approx(8)


def test_slow_streams_need_more_than_one_reader_per_source() -> None:
    assert simulate(100, fanout=2, stream=0.5).finished < simulate(100, fanout=1, stream=0.5).finished
    assert simulate(100, fanout=1).finished < simulate(100, fanout=2).finished


def test_a_chain_takes_one_transfer_and_a_chunk_for_each_further_reader() -> None:
    assert pipelined(1, 10) == 1
    assert pipelined(11, 10) == 2
