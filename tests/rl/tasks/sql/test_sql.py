"""Text to SQL: queries that only read, databases that tell queries apart, and prompts without a value of any."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.tasks.mixture import TaskMixture
from rl.tasks.sql.database import QueryTimeout, query, read_only
from rl.tasks.sql.instances import instance, literals
from rl.tasks.sql.questions import ABSTAIN, SqlQuestions
from rl.verification.verifiers.self_test import Rows
from rl.verification.verifiers.sql import SqlVerifier

MIXTURE = TaskMixture.Config(families=(SqlQuestions.Config(),), heldout_every=4)
SCHEMA = "CREATE TABLE cases (id INTEGER PRIMARY KEY, age INTEGER, ward TEXT);"


def made(rows: int = 3) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    connection.executemany("INSERT INTO cases VALUES (?, ?, ?)", [(i, 30 + i, "north") for i in range(rows)])
    return read_only(connection)


@pytest.mark.parametrize(
    "text",
    [
        "DELETE FROM cases",
        "INSERT INTO cases VALUES (9, 9, 'x')",
        "UPDATE cases SET age = 0",
        "DROP TABLE cases",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t AS SELECT * FROM cases",
        "ATTACH DATABASE '/tmp/x.db' AS x",
        "VACUUM INTO '/tmp/x.db'",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('x')",
        "SELECT writefile('/tmp/x', 'x')",
        "SELECT random()",
        "SELECT 1; DELETE FROM cases",
        "BEGIN",
    ],
)
def test_nothing_but_reading_is_allowed(text: str):
    connection = made()
    with pytest.raises((sqlite3.Error, sqlite3.Warning)):
        query(connection, text, max_rows=5, seconds=1.0)
    assert query(connection, "SELECT COUNT(*), SUM(age) FROM cases", max_rows=5, seconds=1.0).rows == [(3, 93)]


def test_a_query_without_end_is_ended():
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(QueryTimeout, match="not done after 0.2 s"):
        query(made(), endless, max_rows=5, seconds=0.2)


def test_so_many_rows_are_read_and_no_more():
    found = query(made(9), "SELECT id AS number FROM cases ORDER BY id", max_rows=4, seconds=1.0)
    assert found == (["number"], [(0,), (1,), (2,), (3,)], True)


def test_rows_of_an_instance_refer_to_rows_that_are_there():
    schema = """
        CREATE TABLE orders (
            id INTEGER PRIMARY KEY, owner INTEGER, at TIMESTAMP, FOREIGN KEY (owner) REFERENCES owners(id)
        );
        CREATE TABLE owners (id INTEGER PRIMARY KEY, name TEXT, boss INTEGER REFERENCES owners(id), paid REAL);
    """
    connection = instance(schema, 3, ("smith", 5))
    lost = "SELECT COUNT(*) FROM orders WHERE owner NOT IN (SELECT id FROM owners)"
    assert connection.execute(lost).fetchone() == (0,)
    assert connection.execute("SELECT COUNT(*) FROM owners WHERE name = 'smith'").fetchone()[0] > 0
    assert connection.execute("SELECT COUNT(*) FROM orders").fetchone()[0] > 5
    same = instance(schema, 3, ("smith", 5)).execute("SELECT * FROM orders").fetchall()
    assert same == connection.execute("SELECT * FROM orders").fetchall()
    assert same != instance(schema, 4, ("smith", 5)).execute("SELECT * FROM orders").fetchall()


def test_literals_are_the_values_of_a_query():
    assert literals("SELECT a1 FROM t2 WHERE b = 'it''s' AND c > 40 AND d < 1.5 OR c = 40") == ("it's", 40, 1.5)


@settings(deadline=None, max_examples=40)
@given(index=st.integers(0, 500))
def test_every_reference_runs_and_no_value_of_a_database_is_in_the_prompt(index: int):
    problem = MIXTURE.build().train(index)
    verifier: Any = SqlVerifier.Config(mixture=MIXTURE, penalty=1.0).build()
    scored = verifier.judge(problem.answer, problem.answer, problem)
    assert scored["reward"] == scored["right"] == 1.0 and scored["wrong"] == 0.0
    if problem.answer == ABSTAIN:
        assert scored["abstained"] == 1.0
        return
    said = {str(one) for one in literals(problem.answer)}
    words = set(problem.question.replace("(", " ").replace(")", " ").replace(",", " ").replace("?", " ").split())
    for seed in range(3):
        connection = instance(problem.entry["schema"], seed, literals(problem.answer))
        for (table,) in connection.execute("SELECT name FROM sqlite_master").fetchall():
            cells = {str(cell) for row in connection.execute(f"SELECT * FROM {table}") for cell in row}
            assert not (cells & words) - said


def test_training_and_heldout_problems_have_no_schema_in_common():
    tasks = MIXTURE.build()
    trained = {tasks.train(index).entry["schema"] for index in range(300)}
    heldout = tasks.heldout(50)
    assert trained.isdisjoint(problem.entry["schema"] for problem in heldout)
    assert 0.05 < sum(problem.answer == ABSTAIN for problem in heldout) / 50 < 0.45


def test_a_wrong_answer_costs_and_an_abstention_does_not():
    answers = ("SELECT MAX(age) FROM cases", "null", "SELECT 3")
    rows = Rows.Config(rows=tuple({"schema": SCHEMA, "answer": answer} for answer in answers[:2]))
    verifier: Any = SqlVerifier.Config(mixture=rows, penalty=10.0).build()
    rewards = [[verifier.score(i, answer)["reward"] for answer in answers] for i in (0, 1)]
    assert rewards == [[1.0, 0.0, -10.0], [-10.0, 1.0, -10.0]]


def test_a_reference_that_does_not_run_is_an_error_and_no_reward():
    rows = Rows.Config(rows=({"schema": SCHEMA, "answer": "SELECT size FROM cases"},))
    with pytest.raises(LookupError, match="does not run on its schema: no such column: size"):
        SqlVerifier.Config(mixture=rows).build().score(0, "SELECT age FROM cases")


def test_references_of_ehrsql_run_on_instances_of_its_schema(shared_data: Path):
    """Names with quotes, dates, several joins: on made rows a query equals itself and not a constant."""
    folder = shared_data / "ehrsql-2024"
    schema = (folder / "mimic_iv.sql").read_text()
    with gzip.open(folder / "valid.label.json.gz", "rt") as file:
        labels = [label for label in json.load(file).values() if label != "null"][:30]
    rows = Rows.Config(rows=tuple({"schema": schema, "answer": label} for label in labels))
    verifier: Any = SqlVerifier.Config(mixture=rows, seconds=5.0).build()
    assert all(verifier.score(i, label)["right"] for i, label in enumerate(labels))
    assert not any(verifier.score(i, "SELECT 12345")["right"] for i in range(len(labels)))
