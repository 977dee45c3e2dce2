"""The difficulty of rows: how often a policy answers them right, from the samples of an evaluation."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.evaluation.samples import sample_rows
from rl.evaluation.standalone import is_right
from rl.tasks.curation.passes import read_all, write_rows
from rl.tasks.rows.columns import Columns


def with_pass_rates(file: str, folder: Path, columns: Columns, out: Path) -> dict[str, Any]:
    """Write a file's rows with `pass_rate` and `samples` where their question was asked, and return counts."""
    asked = {row["question"]: [is_right(sample) for sample in row["samples"]] for row in sample_rows(folder)}
    rates: list[float] = []

    def rated() -> Iterator[tuple[Mapping[str, Any], str]]:
        for row, where in read_all([file]):
            if (right := asked.get(columns.question(row, where)[0])) is not None:
                rates.append(sum(right) / len(right))
                row = {**row, "pass_rate": rates[-1], "samples": len(right)}
            yield row, where

    count = write_rows(rated(), out)
    return {"rows": count, "rated": len(rates), "mean": sum(rates) / len(rates) if rates else 0.0}
