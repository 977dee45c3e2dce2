"""All published steps are in the table, compiled or not, and the page shows the table of the stored reports."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.remat import find_remat
from mesh.topology import parse_topology
from tests.studies.published import STEPS, config, errors, table

DOCS = Path(__file__).parents[2] / "docs"


def report(seconds: float | None) -> dict[str, Any]:
    bounds = {"compute": 4.0, "hbm": 2.0}
    known = {"fits": seconds is not None, "roofline_s": bounds, "exposed_s": 1.0, "estimated_step_s": seconds}
    return known | {"topology": "v5p:8x8x8", "devices": 512, "flops_analytic": 512 * 459e12 * 5.8}


def test_the_page_has_the_table_of_the_stored_reports():
    stored = json.loads((DOCS / "figures" / "published.json").read_text())
    assert table(stored) in (DOCS / "benchmarks" / "published.md").read_text()
    assert set(stored) <= {step.name for step in STEPS}


def test_the_page_of_the_command_states_the_accuracy_of_the_stored_reports():
    times = [1 / (1 + error) for error in errors(json.loads((DOCS / "figures" / "published.json").read_text()))]
    near = [time for time in times if 0.9 <= time <= 1.5]
    others = [time for time in times if time not in near]
    assert (
        f"Of {len(times)} times that have an estimate, {len(near)} are within this range\n"
        f"({min(near):.2f} to {max(near):.2f} times); the others, of Llama on v6e and v5e, were faster "
        f"({min(others):.2f} to {max(others):.2f} times)."
    ) in (DOCS / "reference" / "aot.md").read_text()


def test_no_point_is_left_out_and_each_is_compared_with_the_one_estimate_of_its_step():
    names = [step.name for step in STEPS]
    two, one, large = names[1], names[3], names[5]
    text = table({two: report(10.0), one: report(2.21), large: report(None)})
    lines = [line for line in text.splitlines() if line.startswith(("| L", "| Q", "| M"))]
    assert len(lines) == sum(len(step.published) for step in STEPS)
    assert [line.split(" | ")[3:6] for line in lines if line.startswith(f"| {two} ")] == [
        ["50%", "10.00", "-14%"],
        ["47%", "10.00", "-19%"],
    ]
    assert sum("does not fit" in line for line in lines) == 1 and "not compiled" in text
    assert errors({two: report(10.0), one: report(2.21)}) == pytest.approx([10.0 / 11.6 - 1, 10.0 / 12.3 - 1, 0.0])
    assert f"{len(lines)} published times, 3 of them with an estimate, 2 within 15 %" in text
    held = [step for step in STEPS if step.held_out]
    assert text.endswith(f"{len(held)} held-out published times, 0 of them with an estimate, 0 within 15 %.")
    name, seconds = held[0].name, held[0].published[0][1]
    assert (
        "1 of them with an estimate, 1 within 15 %"
        in table({name: report(1.1 * seconds), one: report(2.2)}).splitlines()[-1]
    )
    assert (
        "1 of them with an estimate, 0 within 15 %"
        in table({name: report(1.2 * seconds), one: report(2.2)}).splitlines()[-1]
    )


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_our_program_has_the_published_sizes(step):
    cfg, topology = config(step), parse_topology(step.topology, step.slices)
    model: Any = cfg.model
    assert math.prod(step.mesh.values()) == topology.devices
    assert step.rows % (topology.devices * step.microbatches) == 0
    assert step.length <= (model.block.attention.rope.max_length or math.inf)
    find_remat(model.remat)
    assert (cfg.input.batch_size, cfg.input.seq_len) == (step.rows, step.length)
