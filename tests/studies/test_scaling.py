"""Between the sizes that were compiled stands what follows from them; the table of the docs is the tool's."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from tests.studies.scaling import LARGEST_FSDP, facts, links, row, table

DOCS = Path(__file__).parents[2] / "docs"
GATHERED, SUMMED, CUT, WHOLE = 400e9, 130e9, 2e12, 20e9


def report(fsdp: int, data: int = 1) -> dict[str, Any]:
    """Make the report of a step that does just what the tool supposes."""
    chips = fsdp * data
    sent = {"fsdp": {"all-gather": {"bytes": GATHERED * (fsdp - 1) / fsdp}}}
    if data > 1:
        sent["data"] = {"all-reduce": {"bytes": 2 * SUMMED / fsdp * (data - 1) / data}}
    return {
        "slices": 1,
        "devices": chips,
        "fits": True,
        "mesh": {"fsdp": fsdp, "data": data} if data > 1 else {"fsdp": fsdp},
        "hbm": {"arguments": CUT / fsdp, "temp": WHOLE, "output": 1e9, "alias": 1e9, "available": 100e9},
        "collectives": sent,
        "roofline_s": {"link fsdp": GATHERED * (fsdp - 1) / fsdp / 300e9},
        "estimated_step_s": 9.0,
        "exposed_s": 1.0,
        "flops_analytic": 1e15 * chips,
        "rows": 2 * chips,
        "length": 4096,
    }


def test_the_reports_are_found_again():
    known = facts([report(64, 8), report(32), report(64, 2)])
    assert known.busy == 8.0 and known.tokens == 2 * 4096
    assert (known.sharded, known.replicated) == (pytest.approx(CUT), pytest.approx(WHOLE))
    assert (known.gathered, known.summed) == (pytest.approx(GATHERED), pytest.approx(SUMMED))


def test_a_line_by_hand():
    known = facts([report(64, 8), report(32), report(64, 2)])
    small, one, many = row(known, 16), row(known, 1024), row(known, 8192)
    assert small.memory == pytest.approx(CUT / 16 + WHOLE) and not small.fits and one.fits
    assert (many.slices, many.fsdp) == (8, LARGEST_FSDP)
    assert many.fsdp_bytes == pytest.approx(GATHERED * 63 / 64)
    assert many.data_bytes == one.data_bytes == pytest.approx(2 * SUMMED / 64 * 15 / 16)
    assert one.dcn_bytes == 0 and many.dcn_bytes == pytest.approx(2 * SUMMED / 1024 * 7 / 8)
    assert many.dcn == pytest.approx(many.dcn_bytes / 6.25e9)
    assert many.ici == pytest.approx((many.fsdp_bytes + many.data_bytes) / 300e9)
    assert row(known, 64).ici == pytest.approx(many.fsdp_bytes / (6 * 90e9))  # all of a 4x4x4
    # With so many tokens a chip computes for as long as it communicates.
    assert many.covered_from / known.tokens * known.busy == pytest.approx(many.ici + many.dcn)


def test_links_of_slices():
    assert links((2, 2, 2)) == 3 and links((8, 8, 16)) == 6 and links((2, 4, 4)) == 5 and links((4, 1, 1)) == 2


def test_too_few_reports_are_refused():
    with pytest.raises(click.ClickException, match="two sizes of fsdp"):
        facts([report(64), report(32)])


def test_the_table_in_the_docs_is_that_of_the_stored_reports():
    stored = json.loads((DOCS / "figures" / "scaling.json").read_text())
    weak = [one for name, one in stored.items() if name.startswith("weak")]
    text = (DOCS / "benchmarks" / "scaling.md").read_text()
    assert table(facts(weak)) in text
