"""Episodes wait for their tools without rows, and keep their prefixes."""

import pytest

from tests.studies.episodes import QUICK, run


@pytest.mark.full
def test_waiting_episodes_leave_their_rows_and_keep_their_prefixes() -> None:
    figures = run(**QUICK)
    assert figures["overlap_ratio"] > 1.2
    assert figures["prefix_reuse"] >= 0.95
