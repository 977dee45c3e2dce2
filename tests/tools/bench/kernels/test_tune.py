"""`axl bench block_sizes`: what is tried, timed and refused."""

from typing import Any

import pytest

from mesh import UserError
from tools.bench.kernels import tune
from tools.bench.kernels.candidates import PHASES, candidates


def silent(_: str) -> None:
    pass


def test_candidates_begin_with_the_default_and_no_block_exceeds_a_row():
    for phase, grid in PHASES.items():
        found = candidates(phase, 1024)
        assert found[0][next(iter(grid))] == 512 and len(found) == len({tuple(one.items()) for one in found})
        assert all(one[next(iter(grid))] <= 1024 for one in found)


def test_what_has_no_times_here_is_refused():
    with pytest.raises(UserError, match="has no TPU .*or with --quick in simulation"):
        tune.check(quick=False)


@pytest.mark.full
def test_candidates_are_tested_and_timed_in_simulation():
    result = tune.timed(tune.QUICK, 1, silent)
    assert result["best"] == {
        name: size for rows in result["phases"].values() for name, size in _sizes(rows[0]).items()
    }
    assert all(row["seconds"] > 0 for rows in result["phases"].values() for row in rows)


def _sizes(row: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in row.items() if name.endswith(("_keys", "_queries"))}
