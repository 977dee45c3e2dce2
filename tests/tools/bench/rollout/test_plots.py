"""Plots and tables of the docs, from a stored result."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mesh import UserError
from tools.bench.rollout import plots
from tools.bench.rollout.tables import tables

MARKS = f"# Page\n\n{plots.BEGIN}\n\nold\n\n{plots.END}\n\nrest\n"


def result() -> dict[str, Any]:
    way = {"cpu_s": 2.0, "wall_s": 3.0, "tokens": 1000, "over_bound": 1.25, "over_uniform_bound": 1.5}
    at = {"tok_per_cpu_s": 20000.0, "pages_used": 0.1}
    return {
        "quick": False,
        "concurrency_sweep": [
            {
                "max_num_seqs": max_num_seqs,
                "tok_per_s": 1000.0 * max_num_seqs,
                "tok_per_cpu_s": 900.0 * max_num_seqs,
                "latency_ms": {"p50": 100.0, "p95": 150.0, "p99": 160.0},
                "first_token_ms": {"p50": 50.0, "p95": 55.0, "p99": 56.0},
            }
            for max_num_seqs in (1, 2, 4)
        ],
        "continuous_over_static": {"fifo": 2.5},
        "continuous_over_compacting_static": {"fifo": 1.25},
        "long_tail": {
            "median": 96.0,
            "sigma": 1.0,
            "shortest": 16,
            "longest": 512,
            "requests": 256,
            "max_num_seqs": 64,
            "mean": 140.0,
            "ways": {"plain_static": way | {"row_steps_per_token": 2.0}, "fifo": way | {"row_steps_per_token": None}},
        },
        "fill": {"held": {"tenth": at, "nine_tenths": at, "ratio": 1.0}},
        "warm_compiles": 0,
        "machine": {"cores": 2, "cpu": "a processor", "load": 0.1},
        "versions": {"python": "3.12.1", "jax": "0.12.0.1"},
        "date": "2026-11-20",
        "command": "axl bench rollout --json",
    }


def test_plots_are_the_same_bytes_each_time_and_name_what_they_show(tmp_path: Path) -> None:
    shown = {"rollout_latency.svg": "first token, p99", "rollout_throughput.svg": "by CPU second"}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        plots.draw(result(), tmp_path / folder)
    assert {path.name for path in (tmp_path / "a").iterdir()} == set(shown)
    for name, label in shown.items():
        first = (tmp_path / "a" / name).read_bytes()
        assert first == (tmp_path / "b" / name).read_bytes()
        text = list(ElementTree.fromstring(first).itertext())
        assert label in text and "max_num_seqs: requests at a time" in text


def test_page_gets_plots_and_tables_of_the_stored_result(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "rollout.json").write_text(json.dumps(result()))
    page = tmp_path / "benchmarks" / "rollout.md"
    page.parent.mkdir()
    page.write_text(MARKS)
    plots.main(tmp_path)
    text = page.read_text()
    assert text.startswith("# Page") and text.endswith("rest\n") and "old" not in text
    assert "`axl bench rollout --json`, 2026-11-20; 2 cores of a processor" in text
    assert "| fifo | 2.00 | 3.00 | 2000.0 | 2.50 | 1.25 | 1.25 | 1.50 |  |" in text
    assert "| 4 | 4,000 | 3,600 | 100 | 150 | 160 | 50 | 55 | 56 |" in text
    assert (tmp_path / "figures" / "rollout_latency.svg").is_file()
    again = plots.fill_in(text, result())
    assert again == text


def test_tables_show_only_what_was_measured() -> None:
    part = {key: result()[key] for key in ("concurrency_sweep", "warm_compiles")}
    assert [table.title.partition(":")[0] for table in tables(part)] == ["concurrency", "single figures"]
    for table in tables(result()):
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_quick_results_missing_ones_and_pages_without_marks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="axl bench rollout --json"):
        plots.main(tmp_path)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "rollout.json").write_text(json.dumps(result() | {"quick": True}))
    with pytest.raises(UserError, match="--quick"):
        plots.main(tmp_path)
    with pytest.raises(UserError, match="marks"):
        plots.fill_in("# Page without", result())


def test_the_page_in_the_docs_has_the_marks(checkout: Path) -> None:
    page = (checkout / "docs" / "benchmarks" / "rollout.md").read_text()
    assert "| 1 |" in plots.fill_in(page, result())
