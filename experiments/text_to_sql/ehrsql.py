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
from experiments.text_to_sql.attempts import SqlAttempts
from experiments.text_to_sql.prompts import Example, instructed, masked, outline
from experiments.text_to_sql.verifier import SqlVerifier
from rl.environments.retrieval.bm25 import BM25
from rl.environments.task import EnvironmentTask
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.columns import Columns
from rl.tasks.rows.task_rows import TaskRows

__all__ = ["EhrsqlRows", "by_results", "ehrsql", "ehrsql_attempts"]


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
    tries: bool = False,
) -> TaskRows.Config:
    """Questions on health records (EHRSQL-2024): `data` has the questions, `labels` their SQL ("null": abstain).

    Args:
        labels: file of their queries; None: queries and schema lie beside the questions, under their own names.
        heldout: both of another part, to evaluate on.
        schema: file of CREATE TABLE statements: prompts show its names, and `SqlVerifier` makes databases of it; None:
            the question alone.
        examples: questions and queries of another part, for few-shot prompts: values in them are masked.
        shots: examples in a prompt: those whose questions share the most words with it (BM25), the nearest last.
        steps: ask for a chain of thought before the query.
        tries: say in the prompt that there are several (`SqlAttempts`).
    """
    if labels is None:
        folder, slash, name = data.rpartition("/")
        labels = f"{folder}{slash}{name.replace('.data.', '.label.')}"
        schema = schema or f"{folder}{slash}mimic_iv.sql"
    shown = (
        {"schema": schema, "examples": examples, "shots": shots, "steps": steps, "tries": tries}
        if schema is not None
        else {}
    )
    part = lambda files: EhrsqlRows.Config(data=files[0], labels=files[1], **shown)  # noqa: E731
    columns = Columns.Config(prompt="question" if schema is None else "prompt", answer="query", id="id")
    other = None if heldout is None else part(heldout)
    return TaskRows.Config(rows=part((data, labels)), heldout=other, columns=columns, label="ehrsql")


def ehrsql_attempts(folder: str = "$EHRSQL", *, shots: int = 4) -> TaskMixture.Config:
    """The test questions of EHRSQL-2024 in a folder, with three tries each and the nearest examples of `valid`."""
    test, valid = ((f"{folder}/{part}.data.json.gz", f"{folder}/{part}.label.json.gz") for part in ("test", "valid"))
    rows = ehrsql(*test, test, schema=f"{folder}/mimic_iv.sql", examples=valid, shots=shots, tries=True)
    # An action without end is a query that does not run: the last one is judged.
    environment = SqlAttempts.Config(tries=3, seconds=5.0, max_turn_tokens=256)
    return TaskMixture.Config(families=(EnvironmentTask.Config(source=rows, environment=environment),))


class EhrsqlRows(Configurable):
    """Rows {"id", "question", "query"} of a part of EHRSQL-2024; given a schema also {"schema", "prompt"}."""

    class Config(ConfigBase["EhrsqlRows"]):
        data: str = REQUIRED  # file of the questions
        labels: str = REQUIRED  # file of their queries
        schema: str | None = None  # file of CREATE TABLE statements, whose names the prompts show
        examples: tuple[str, str] | None = None  # questions and queries of another part, for few-shot prompts
        shots: int = 4
        steps: bool = False  # ask for a chain of thought before the query
        tries: bool = False  # say that there are several

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location."""
        cfg = self._cfg
        statements = None if cfg.schema is None else _read(cfg.schema).decode()
        names = "" if statements is None else outline(statements)
        known = (
            []
            if cfg.examples is None
            else [Example(row["question"], row["query"]) for row in _questions(*cfg.examples)]
        )
        index = BM25([masked(one).question for one in known])
        for number, row in enumerate(_questions(cfg.data, cfg.labels)):
            if statements is not None:
                nearest = [known[place] for place, _ in reversed(index.search(row["question"], cfg.shots))]
                row |= {
                    "schema": statements,
                    "prompt": instructed(names, row["question"], nearest, steps=cfg.steps, tries=cfg.tries),
                }
            yield row, f"{cfg.data}, row {number}"


def _questions(data: str, labels: str) -> Iterator[dict[str, Any]]:
    queries = _document(labels)
    for row in _document(data)["data"]:
        if row["id"] not in queries:
            raise InputError(f"{labels} has no query for question {row['id']!r} of {data}")
        yield {"id": row["id"], "question": row["question"], "query": queries[row["id"]]}


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
