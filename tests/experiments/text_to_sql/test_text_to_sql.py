"""Text to SQL: queries that only read, databases that tell queries apart, and prompts without a value of any."""

import gzip
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.input.source import InputError
from experiments.datasets import find_dataset
from experiments.text_to_sql.database import QueryTimeout, memory_database, query, read_only
from experiments.text_to_sql.ehrsql import EhrsqlRows, ehrsql
from experiments.text_to_sql.instances import instance, literals
from experiments.text_to_sql.prompts import Example, instructed, outline
from experiments.text_to_sql.questions import ABSTAIN, LAST_LINE, SqlQuestions
from experiments.text_to_sql.tool import connect
from experiments.text_to_sql.verifier import SqlVerifier
from rl.tasks.mixture import TaskMixture
from rl.verification.verifiers.self_test import Rows

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


@pytest.mark.slow
def test_examples_and_steps_are_in_the_prompt_and_no_text_of_a_database_is():
    def of(**fields: Any) -> TaskMixture.Config:
        return TaskMixture.Config(families=(SqlQuestions.Config(**fields),), heldout_every=4)

    plain, shown = of().build(), of(shots=3, steps=True).build()
    verifier: Any = SqlVerifier.Config(mixture=of(shots=3, steps=True), field="query", answer_pattern=LAST_LINE).build()
    heldout = {problem.entry["schema"] for problem in plain.heldout(40)}
    for index in range(25):
        one, other = plain.train(index), shown.train(index)
        assert other.question.endswith(f"\n\n{one.question}") and other.question.count("\n\n") == 3
        assert other.answer.endswith(f"\n{one.answer}") and " is " in other.answer
        assert shown.score(other, other.answer) == 1.0
        assert verifier.score(other.id, other.answer)["right"] == 1.0
        assert verifier.score(other.id, f"{other.answer}\nSELECT 12345")["right"] == 0.0
        *examples, _ = other.question.split("\n\n")
        assert all(len(example.splitlines()) == 5 for example in examples)
        assert not {"north", "south", "east", "west"} & set(re.findall(r"\w+", " ".join(examples)))
        assert not re.search(r"\d", " ".join(examples))
    outlines = {
        problem.question.split("\n\n")[k].rsplit("\n", 3)[0]
        for problem in map(shown.train, range(60))
        for k in range(3)
    }
    assert len(outlines) > 50
    assert outlines.isdisjoint("\n".join(problem.question.splitlines()[:2]) for problem in plain.heldout(40))
    assert len(heldout) > 20


LEAKY = """
    CREATE TABLE wards (name TEXT PRIMARY KEY DEFAULT 'Secretville', beds INT(77) CHECK (beds <> 4711)); -- Ms Secret
    CREATE TABLE cases (id INTEGER PRIMARY KEY, ward TEXT REFERENCES wards(name), kind TEXT CHECK (kind IN ('secret')));
    INSERT INTO wards VALUES ('Hidden Hill', 4712); /* Mr Secret */
    CREATE VIEW seen AS SELECT 'secret view' AS text;
"""


def test_a_schema_is_shown_by_its_names_alone():
    names = "wards(name TEXT, beds INT)\ncases(id INTEGER, ward TEXT -> wards.name, kind TEXT)"
    assert outline(LEAKY) == names
    examples = [
        Example("Beds of hidden hill over 4,711.5?", "SELECT beds FROM wards WHERE name = 'Hidden Hill' AND x > 4711.5")
    ]
    prompt = instructed(outline(LEAKY), "How many wards?", examples, steps=True)
    assert not re.search("secret|hidden|47", prompt, re.IGNORECASE)
    assert prompt.endswith("Question: How many wards?\nAnswer:") and "WHERE name = '...' AND x > ..." in prompt
    with pytest.raises(InputError, match="the schema does not run: .*syntax error"):
        outline("CREATE TABLE (")
    for text in ("ATTACH DATABASE 'mark.db' AS x; CREATE TABLE x.t (a)", "VACUUM INTO 'mark.db'"):
        with pytest.raises(InputError, match="too many attached databases"):
            outline(text)
    assert not Path("mark.db").exists()


def test_a_script_opens_and_writes_no_file(tmp_path: Path):
    """A schema comes with the rows of a data set, a script with a config: SQLite would write what they say anywhere."""
    file = tmp_path / "escaped"
    for text in (
        f"ATTACH DATABASE '{file}' AS x; CREATE TABLE x.t (a TEXT); INSERT INTO x.t VALUES ('x')",
        f"CREATE TABLE t (a INT); VACUUM INTO '{file}'",
    ):
        for use in (memory_database, lambda script: connect(None, script), lambda script: instance(script, 0)):
            with pytest.raises(sqlite3.Error, match="too many attached databases"):
                use(text)
        assert not file.exists()


ENDLESS = "CREATE TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT {}) SELECT {} FROM n;"


def test_a_script_ends_and_makes_a_database_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("experiments.text_to_sql.database._SCRIPT_PAGES", 256)
    growing = ENDLESS.format("i + 1 FROM n", "hex(zeroblob(1000))")
    for text in (growing, "PRAGMA foreign_keys=1; " + growing):
        with pytest.raises(sqlite3.Error, match="database or disk is full"):
            memory_database(text)
    with pytest.raises(sqlite3.Error, match="not authorized"):
        memory_database("PRAGMA max_page_count=4294967294; " + growing)
    monkeypatch.setattr("experiments.text_to_sql.database._SCRIPT_SECONDS", 0.2)
    with pytest.raises(sqlite3.Error, match=r"the script is not done after 0\.2 s"):
        memory_database(ENDLESS.format("0 FROM n", "count(*)"))


@pytest.mark.slow
def test_no_value_of_the_references_is_in_the_examples_of_ehrsql(shared_data: Path):
    folder = f"{shared_data}/ehrsql-2024"
    test, valid = ((f"{folder}/{part}.data.json.gz", f"{folder}/{part}.label.json.gz") for part in ("test", "valid"))
    cfg = ehrsql(*test, schema=f"{folder}/mimic_iv.sql", examples=valid, shots=6, steps=True)
    problem = TaskMixture.Config(families=(cfg,)).build().train(0)
    assert problem.question.startswith("Write one SQLite query") and "admissions(row_id INT" in problem.question
    shown = problem.question.rpartition("Question:")[0]
    assert shown.count("Question:") == 6
    known = set(re.findall(r"\w+", problem.question.rpartition("Question:")[2].lower())) - {"answer"}
    nearest = re.findall(r"Question: (.*)", shown)
    assert all(len(known & set(re.findall(r"\w+", one.lower()))) > 2 for one in nearest)
    texts = {
        one
        for row, _ in list(EhrsqlRows.Config(data=valid[0], labels=valid[1]).build().rows())[:250]
        for one in literals(row["query"])
        if isinstance(one, str)
    }
    texts = {
        one
        for one in texts
        if len(one) > 6 and not re.fullmatch(r"[\d%: -]+", one) and one not in outline(problem.entry["schema"])
    }
    words = {"start of month", "start of year", "+0 month", "-0 year"}
    assert len(texts) > 100
    found = [one for one in texts - words if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", shown, re.IGNORECASE)]
    assert found == []


@pytest.mark.slow
def test_ehrsql_is_a_name_of_a_file(shared_data: Path):
    found = find_dataset("ehrsql")
    assert found is not None and found.verifier is not None
    cfg = found.rows(f"{shared_data}/ehrsql-2024/test.data.json.gz")
    mixture = TaskMixture.Config(families=(cfg.set(heldout=cfg.rows.clone()),))
    every, verifier = mixture.build().for_evaluation(None, 0), found.verifier(mixture).build()
    abstains = next(problem for problem in every if problem.answer == ABSTAIN)
    assert len(every) == 1167
    for problem in [*every[:2], abstains]:
        right, wrong = verifier.score_samples(problem.id, [problem.answer, "SELECT 12345"], [])
        assert (right["right"], wrong["right"], wrong["wrong"]) == (1.0, 0.0, 1.0)


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


@pytest.mark.slow
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
