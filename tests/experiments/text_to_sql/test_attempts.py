"""Tries of a query: what the policy is told of its result, which answer stands, and votes by results."""

import math
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigError
from experiments.text_to_sql.attempts import SqlAttempts
from experiments.text_to_sql.config import Form, questions, text_to_sql_sft
from experiments.text_to_sql.prompts import Example, instructed
from experiments.text_to_sql.questions import ABSTAIN
from experiments.text_to_sql.shown import TRIES, attempts
from experiments.text_to_sql.verifier import SqlVerifier
from rl.environments.demonstrations import Mistake
from rl.environments.environment import Consult, row_of

SCHEMA = "CREATE TABLE cases (id INTEGER PRIMARY KEY, age INTEGER, ward TEXT);"
ROW: dict[str, Any] = {"question": "How many cases?", "schema": SCHEMA}


def begun(**fields: Any) -> Any:
    made = SqlAttempts.Config(**fields).build()
    assert made.reset(ROW) == ""
    return made


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT MAX(age) FROM cases", "1 row: INTEGER"),
        ("SELECT ward, age, NULL, 1.5, x'00' FROM cases", "14 rows: TEXT, INTEGER, NULL, REAL, BLOB"),
        ("SELECT CASE WHEN id < 3 THEN id ELSE ward END FROM cases", "14 rows: INTEGER/TEXT"),
        ("SELECT a.id FROM cases a, cases b", "100+ rows: INTEGER"),
        ("SELECT age FROM cases WHERE 0", "0 rows"),
        ("SELECT kg FROM cases", "no such column: kg"),
        ("SELECT age FROM homes", "no such table: homes"),
        ("DELETE FROM cases", "not authorized"),
        ("SELECT json_extract('{}', ward) FROM cases", "fails on the rows"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT COUNT(*) FROM n", "too slow"),
        ("```sql\nSELECT id FROM cases;\n```", "14 rows: INTEGER"),
        ("SELECT '\0'", "the query contains a null character"),
    ],
)
def test_the_error_or_the_shape_is_told(query: str, told: str) -> None:
    tries = begun(seconds=0.2)
    assert tries.step(query) == (f"\n{told}\n", 0.0, False)
    tries.close()


def test_the_last_query_stands_or_the_one_that_is_kept() -> None:
    first, second = "SELECT kg FROM cases", "SELECT age FROM cases"
    for actions, answer in (
        ((first, second), second),
        ((first, "ok"), first),
        ((first, ""), first),
        ((first, ABSTAIN), ABSTAIN),
        ((ABSTAIN,), ABSTAIN),
        (("ok", second), second),
    ):
        tries = begun()
        *before, last = [tries.step(action) for action in actions]
        assert not any(done for _, _, done in before) and (last.done, last.answer) == (True, answer)
        assert tries.figures() == {"tries": len(actions)}
        tries.close()


def test_results_are_voted_on_and_not_texts() -> None:
    tries = begun(tries=1, votes=4, agree=0.5)
    asked = tries.step("SELECT MAX(age) FROM cases")
    assert asked == Consult(None, ROW["question"], samples=4)
    heard = tries.hear(
        ["SELECT COUNT(*) FROM cases", "SELECT 14", "SELECT count(id) FROM cases;", "SELECT kg FROM cases"]
    )
    assert (heard.done, heard.answer) == (True, "SELECT COUNT(*) FROM cases")
    assert tries.hear(["SELECT 1", "SELECT 2", "SELECT 3", "SELECT 3"]).answer == ABSTAIN
    assert tries.hear(["nothing", "at", "all", "runs"]).answer == ABSTAIN
    assert tries.hear([ABSTAIN, ABSTAIN, ABSTAIN, "SELECT 3"]).answer == ABSTAIN
    assert tries.figures()["agreed"] == 0.6
    tries.close()
    with pytest.raises(ConfigError, match="agree: expected 0 without `votes`"):
        SqlAttempts.Config(agree=0.5).check_fields()


CELLS = st.one_of(
    st.text("QXZÄ", min_size=4, max_size=8),
    st.integers(10**6, 10**12),
    st.floats(10**6, 10**9).map(lambda value: round(value, 2) + 0.25),
    st.binary(min_size=4, max_size=6),
)
# Each would show a cell if errors of the database, or columns of the result, were shown.
QUERIES = (
    "SELECT {c} FROM t",
    "SELECT *, {c} AS other FROM t",
    "SELECT json_extract('{{}}', {c}) FROM t",
    "SELECT json({c}) FROM t",
    "SELECT * FROM t, json_each('[]', {c})",
    "SELECT * FROM t, json_each({c})",
    "SELECT id FROM t WHERE json_extract({c}, '$')",
    "SELECT id FROM t ORDER BY json({c})",
    "SELECT group_concat({c}) FROM t",
    "SELECT printf('%s %d', {c}, {c}) FROM t",
    "SELECT {c} + 9223372036854775807 FROM t",
    "SELECT {c} LIKE 'a' ESCAPE {c} FROM t",
    "SELECT {c} MATCH {c} FROM t",
    "SELECT nothing({c}) FROM t",
    "SELECT {c}.x FROM t",
    "SELECT hidden, json_extract('{{}}', hidden) FROM v",
    "SELECT * FROM pragma_table_info((SELECT {c} FROM t))",
    "SELECT load_extension({c}) FROM t",
    "SELECT strftime({c}, 'now') FROM t",
    "SELECT (SELECT {c} FROM t LIMIT 1) FROM t GROUP BY {c} HAVING json({c})",
    "UPDATE t SET a = {c} RETURNING {c}",
    "{c}",
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(QUERIES), st.sampled_from(("a", "b"))), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_no_cell_is_in_anything_that_a_policy_is_shown(
    rows: list[tuple[Any, Any]], tried: list[tuple[str, str]], shots: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(Path(folder) / "real.db")
        connection.executescript("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b);")
        connection.executemany("INSERT INTO t (a, b) VALUES (?, ?)", rows)
        text = next((cell for row in rows for cell in row if isinstance(cell, str)), "QQQQ")
        connection.execute(f"CREATE VIEW v AS SELECT '{text}' AS hidden")
        connection.commit()
        connection.close()
        named = [cell for cell, _ in rows if not isinstance(cell, bytes)]
        examples = [Example(f"Rows of {cell}.", f"SELECT id FROM t WHERE a = {cell!r}") for cell in named]
        prompt = instructed("t(id, a, b)", "How many?", examples[:shots])
        tries = SqlAttempts.Config(tries=9, votes=1, database=str(Path(folder) / "real.db")).build()
        told = [prompt, tries.reset({"question": prompt, "schema": ""})]
        told += [tries.step(query.format(c=column))[0] for query, column in tried]
        told.append(tries.step(ABSTAIN).prompt)
        tries.close()
    for cell in {*(cell for row in rows for cell in row), text}:
        for shown in _forms(cell):
            assert shown not in "\n".join(told)


def _forms(cell: Any) -> set[str]:
    if isinstance(cell, bytes):
        return {cell.hex(), str(cell)[2:-1]}
    return {str(cell), str(math.floor(cell))} if isinstance(cell, float) else {str(cell)}


@settings(deadline=None, max_examples=60)
@given(index=st.integers(0, 2000), steps=st.booleans())
def test_a_demonstration_ends_right_within_the_tries(index: int, steps: bool) -> None:
    tasks = questions(0, Form(steps=steps))
    problem = tasks.build().train(index)
    actions, environment = attempts(problem), tasks.families[0].environment.build()  # pyright: ignore
    environment.reset(row_of(problem, 0))
    for action in actions:
        told = environment.step(action)
        assert isinstance(action, Mistake) == ("no such" in told[0])
    assert told.done and len(actions) <= TRIES
    verifier: Any = SqlVerifier.Config(mixture=tasks).build()
    assert verifier.judge(told.answer, problem.entry["query"], problem)["right"] == 1.0
    environment.close()


def test_mistakes_are_seen_and_not_learned() -> None:
    cfg: Any = text_to_sql_sft().input
    source = cfg.source.set(num_examples=40).build()
    for index in range(40):
        actions, row = attempts(source.problem(index)), source[index]
        learned = source.tokenizer.decode(row["tokens"][row["loss_mask"]].tolist())
        whole = source.tokenizer.decode(row["tokens"].tolist())
        assert all(action in whole for action in actions)
        assert not any(action in learned for action in actions if isinstance(action, Mistake))
        assert all(action in learned for action in actions if not isinstance(action, Mistake))
        assert np.sum(row["loss_mask"]) > 0
