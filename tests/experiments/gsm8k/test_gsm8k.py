"""RL on the rows of GSM8K: one update of the experiment, from random weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.registry import get
from tests.test_examples import one_update


@pytest.mark.full
def test_rows_of_a_file_are_trained_on(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXL_DATA", str(shared_data))
    cfg: Any = get("gsm8k_small")
    one_update(cfg, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["phase"], row["step"]) for row in rows] == [("rl", 1)]
    assert list(json.loads((tmp_path / "run" / "data.json").read_text())) == ["gsm8k"]
