"""Published datasets by a line each: their files are the user's, by path (nothing is downloaded)."""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from axlearn_like.input.source import InputError
from rl.tasks.rows.columns import Columns
from rl.tasks.rows.sources import RowFiles, RowFunction
from rl.tasks.rows.task_rows import TaskRows

__all__ = ["DATASETS", "ehrsql", "gsm8k", "humaneval", "rows"]


def rows(files: str | tuple[str, ...], heldout: str | tuple[str, ...] | None = None, **columns: Any) -> TaskRows.Config:
    """Rows of files, with the fields `prompt` and `answer`, or those that `columns` name (see `Columns.Config`)."""
    other = None if heldout is None else RowFiles.Config(files=heldout)
    return TaskRows.Config(rows=RowFiles.Config(files=files), heldout=other, columns=Columns.Config(**columns))


def gsm8k(files: str | tuple[str, ...], heldout: str | tuple[str, ...] | None = None) -> TaskRows.Config:
    """Grade-school problems (openai/grade-school-math): the number behind the last #### is scored."""
    cfg = rows(files, heldout, prompt="question", answer="answer", answer_after="####")
    return cfg.set(label="gsm8k")


def humaneval(files: str | tuple[str, ...]) -> TaskRows.Config:
    """Python functions to complete (openai/human-eval): a verifier of code runs the row's `test` on `entry_point`."""
    return rows(files, prompt="prompt", answer="canonical_solution", id="task_id").set(label="humaneval")


def ehrsql(data: str, labels: str, heldout: tuple[str, str] | None = None) -> TaskRows.Config:
    """Questions on health records (EHRSQL-2024): `data` has the questions, `labels` their SQL ("null": abstain)."""
    other = None
    if heldout is not None:
        other = RowFunction.Config(function=ehrsql_rows, arguments=dict(zip(("data", "labels"), heldout, strict=True)))
    columns = Columns.Config(prompt="question", answer="query", id="id")
    source = RowFunction.Config(function=ehrsql_rows, arguments={"data": data, "labels": labels})
    return TaskRows.Config(rows=source, heldout=other, columns=columns, label="ehrsql")


def ehrsql_rows(data: str, labels: str) -> Iterator[dict[str, Any]]:
    """Yield {"id", "question", "query"} of a part of EHRSQL-2024."""
    queries = _document(labels)
    for row in _document(data)["data"]:
        if row["id"] not in queries:
            raise InputError(f"{labels} has no query for question {row['id']!r} of {data}")
        yield {"id": row["id"], "question": row["question"], "query": queries[row["id"]]}


# What `NAME=FILE` means where tasks are named on a command line.
DATASETS: dict[str, Callable[..., TaskRows.Config]] = {"gsm8k": gsm8k, "humaneval": humaneval}


def _document(path: str) -> Any:
    file = Path(os.path.expandvars(path)).expanduser()
    try:
        data = file.read_bytes()
        return json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
