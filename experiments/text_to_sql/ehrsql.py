"""EHRSQL-2024 (glee4810/ehrsql-2024): questions on health records. Its files are the user's, by path."""

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.source import InputError
from experiments.datasets import dataset
from experiments.text_to_sql.prompts import Example, instructed, outline
from experiments.text_to_sql.verifier import SqlVerifier
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.columns import Columns
from rl.tasks.rows.task_rows import TaskRows

__all__ = ["EhrsqlRows", "by_results", "ehrsql"]


def by_results(mixture: TaskMixture.Config) -> SqlVerifier.Config:
    """Results of the query on databases made for the row's schema; RS(0) is its pass@1."""
    return SqlVerifier.Config(mixture=mixture, seconds=5.0)


@dataset(verifier=by_results)
def ehrsql(
    data: str,
    labels: str | None = None,
    heldout: tuple[str, str] | None = None,
    *,
    schema: str | None = None,
    examples: tuple[str, str] | None = None,
    shots: int = 4,
    steps: bool = False,
) -> TaskRows.Config:
    """Questions on health records (EHRSQL-2024): `data` has the questions, `labels` their SQL ("null": abstain).

    Args:
        labels: file of their queries; None: queries and schema lie beside the questions, under their own names.
        heldout: both of another part, to evaluate on.
        schema: file of CREATE TABLE statements: prompts show its names, and `SqlVerifier` makes databases of it; None:
            the question alone.
        examples: questions and queries of another part, for few-shot prompts: values in them are masked.
        shots: examples in a prompt; the first ones, one of which abstains.
        steps: ask for a chain of thought before the query.
    """
    if labels is None:
        folder, slash, name = data.rpartition("/")
        labels = f"{folder}{slash}{name.replace('.data.', '.label.')}"
        schema = schema or f"{folder}{slash}mimic_iv.sql"
    shown = {"schema": schema, "examples": examples, "shots": shots, "steps": steps} if schema is not None else {}
    part = lambda files: EhrsqlRows.Config(data=files[0], labels=files[1], **shown)  # noqa: E731
    columns = Columns.Config(prompt="question" if schema is None else "prompt", answer="query", id="id")
    other = None if heldout is None else part(heldout)
    return TaskRows.Config(rows=part((data, labels)), heldout=other, columns=columns, label="ehrsql")


class EhrsqlRows(Configurable):
    """Rows {"id", "question", "query"} of a part of EHRSQL-2024; given a schema also {"schema", "prompt"}."""

    class Config(ConfigBase["EhrsqlRows"]):
        data: str = REQUIRED  # file of the questions
        labels: str = REQUIRED  # file of their queries
        schema: str | None = None  # file of CREATE TABLE statements, whose names the prompts show
        examples: tuple[str, str] | None = None  # questions and queries of another part, for few-shot prompts
        shots: int = 4
        steps: bool = False  # ask for a chain of thought before the query

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location."""
        cfg = self._cfg
        statements = None if cfg.schema is None else _read(cfg.schema).decode()
        names = "" if statements is None else outline(statements)
        chosen = () if cfg.examples is None else _chosen(_questions(*cfg.examples), cfg.shots)
        for number, row in enumerate(_questions(cfg.data, cfg.labels)):
            if statements is not None:
                row |= {"schema": statements, "prompt": instructed(names, row["question"], chosen, steps=cfg.steps)}
            yield row, f"{cfg.data}, row {number}"


def _questions(data: str, labels: str) -> Iterator[dict[str, Any]]:
    queries = _document(labels)
    for row in _document(data)["data"]:
        if row["id"] not in queries:
            raise InputError(f"{labels} has no query for question {row['id']!r} of {data}")
        yield {"id": row["id"], "question": row["question"], "query": queries[row["id"]]}


def _chosen(rows: Iterator[dict[str, Any]], count: int) -> tuple[Example, ...]:
    """Return the first examples that can be answered, and last one that cannot, if there is one."""
    answered: list[Example] = []
    for row in rows:
        one = Example(row["question"], row["query"])
        if one.query != "null":
            answered.append(one)
        elif len(answered) >= count - 1:
            return (*answered[: count - 1], one)[:count]
    return tuple(answered[:count])


def _document(path: str) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def _read(path: str) -> bytes:
    file = Path(os.path.expandvars(path)).expanduser()
    try:
        data = file.read_bytes()
        return gzip.decompress(data) if file.suffix == ".gz" else data
    except OSError as error:
        raise InputError(f"{path}: {error}") from None
