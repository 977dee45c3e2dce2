"""Figures of a section that is interrupted."""

from typing import Any

import pytest

from tests.benches.keeping import keeping
from tests.benches.tiers.link import figures
from tools.bench.harness.sections import run_sections


@pytest.mark.parametrize(("done", "kept"), [(2, {"first": {"rows": [0, 1]}}), (0, {})])
def test_ctrl_c_keeps_what_a_section_has_found(done: int, kept: dict[str, Any]) -> None:
    def section() -> dict[str, Any]:
        rows: list[int] = []
        with keeping(rows, lambda: {"rows": rows}):
            for number in range(5):
                if number == done:
                    raise KeyboardInterrupt
                rows.append(number)
        return {}

    assert run_sections({"first": section, "second": dict}, lambda _: None) == (kept, ["first", "second"])


def test_figures_of_a_link_are_of_the_codecs_that_were_measured() -> None:
    raw, int8 = ({"first_s": 2.0 * later, "later_s": later, "nbytes": 1} for later in (6.0, 2.0))
    assert figures({"raw": raw}, 7)["first_rollout_by_codec"] == {"raw": 1.0}
    both = figures({"raw": raw, "int8": int8}, 7)
    assert both["first_rollout_codec"] == "int8" and both["first_rollout_by_codec"] == {"raw": 1.0, "int8": 3.0}
