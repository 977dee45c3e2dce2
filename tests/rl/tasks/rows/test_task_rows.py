"""Rows of files, datasets, functions and Grain sources become the same problems; what is wrong has one message."""

import gzip
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import from_text, to_text
from axlearn_like.input.source import InputError
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh.errors import UserError
from rl.tasks.encoding import encode_problem
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import PromptMaker
from rl.tasks.rows.columns import Columns
from rl.tasks.rows.datasets import rows
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows, same_answer
from rl.verification.scorers import ReasoningGymScorer

ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "level": n % 3} for n in range(40)]
TOKENIZER = ByteTokenizer.Config().build()


def made(count: int = 40) -> Iterator[dict[str, Any]]:
    """The rows, as a user's function yields them."""
    yield from ROWS[:count]


def by_index() -> Any:
    """The rows as a Grain source: by random access."""
    import grain

    return grain.MapDataset.source(ROWS)


def mixture(*families: Any, **fields: Any) -> TaskMixture:
    return TaskMixture.Config(families=families, **fields).build()


def write(path: Path, rows: list[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def datasets(folder: Path) -> dict[str, TaskRows.Config]:
    """The rows in every form."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(ROWS)
    (folder / "hub" / "data").mkdir(parents=True)
    for part in range(2):
        name = f"train-0000{part}-of-00002.parquet"
        pyarrow.parquet.write_table(table.slice(part * 20, 20), folder / "hub" / "data" / name)
    saved = folder / "saved" / "train"
    saved.mkdir(parents=True)
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pyarrow.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "rows.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    files = [write(folder / "rows.jsonl", ROWS), write(folder / "rows.jsonl.gz", ROWS), str(folder / "rows.json")]
    found = {name: rows(name) for name in [*files, str(folder / "hub"), str(folder / "saved")]}
    return {**found, "made": TaskRows.Config(rows=RowFunction.Config(function=made))}


def test_every_form_of_the_same_rows_gives_the_same_problems(tmp_path: Path):
    forms = datasets(tmp_path)
    pytest.importorskip("grain")
    forms["grain"] = TaskRows.Config(rows=RowFunction.Config(function=by_index))
    plans = {}
    for name, cfg in forms.items():
        assert from_text(to_text(cfg)) == cfg
        tasks = mixture(cfg.set(label="sums"))
        plans[name] = [tasks.train(i) for i in range(90)] + tasks.heldout(2)
        assert tasks.digests() == {"sums": tasks.digests()["sums"]}
    first = plans.pop("made")
    assert all(plan == first for plan in plans.values()) and len(plans) == 6
    problem = first[0]
    assert (
        problem.question.startswith("What is") and problem.entry in ROWS and problem.answer == problem.entry["answer"]
    )


def test_each_epoch_has_every_row_once_in_an_order_of_its_own_that_any_process_finds():
    cfg = TaskRows.Config(rows=RowFunction.Config(function=made), label="sums")
    tasks = mixture(cfg, heldout_every=4)
    heldout = {p.question for p in tasks.heldout(5)}
    size = sum(row["prompt"] not in {p.question for p in _all_heldout(tasks)} for row in ROWS)
    epochs = [[tasks.train(e * size + i) for i in range(size)] for e in range(3)]
    assert all({p.question for p in epoch} == {p.question for p in epochs[0]} for epoch in epochs)
    assert all(len({p.question for p in epoch}) == size for epoch in epochs)
    assert not heldout & {p.question for p in epochs[0]}
    orders = [[p.question for p in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2] and orders[0] != [
        q for q in (r["prompt"] for r in ROWS) if q in orders[0]
    ]
    every = [p.id for epoch in epochs for p in epoch]
    assert len(set(every)) == len(every)  # a row that comes again is drawn with other keys
    again = mixture(cfg, heldout_every=4)
    assert [again.train(i).id for i in (size + 1, 0, 2 * size)] == [epochs[1][1].id, epochs[0][0].id, epochs[2][0].id]
    assert again.problem(epochs[2][3].id) == epochs[2][3]
    plain = mixture(cfg.clone(shuffle=False), heldout_every=4)
    kept = [row["prompt"] for row in ROWS if row["prompt"] in orders[0]]
    assert [plain.train(i).question for i in range(size)] == kept
    assert orders[0] != [mixture(cfg, heldout_every=4, seed=1).train(i).question for i in range(size)]


def _all_heldout(tasks: TaskMixture) -> list[Any]:
    with pytest.raises(UserError, match=r"has (\d+) distinct held-out questions") as found:
        tasks.heldout(40)
    return tasks.heldout(int(str(found.value).split("has ")[1].split()[0]))


def test_long_rows_are_replaced_and_no_problem_comes_twice():
    table = [{"prompt": f"{n}" + " long" * 20 * (n % 2), "answer": "0"} for n in range(64)]
    cfg = TaskRows.Config(rows=RowFunction.Config(function=as_given, arguments={"table": table}), label="mixed")
    tasks = mixture(cfg, heldout_every=10**9)
    maker = tasks.admission = PromptMaker(TOKENIZER, max_prompt_tokens=10)
    epoch = [tasks.train(i) for i in range(64)]
    assert len({p.id for p in epoch}) == 64 and {p.question for p in epoch} == {str(n) for n in range(0, 64, 2)}
    assert maker.skipped.counts()["mixed"]["long"] >= 32


def test_questions_that_are_all_too_long_are_said_to_be(tmp_path: Path):
    """Before, the message said to ask for at most 0."""
    tasks = mixture(rows(write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS[:3])))
    tasks.admission = PromptMaker(TOKENIZER, max_prompt_tokens=1)
    with pytest.raises(
        UserError, match=r"prompts of 3 are longer than max_prompt_tokens=1 \(the longest has \d+ tokens\); set max"
    ):
        tasks.for_evaluation(None, 8)


def test_held_out_files_are_never_trained_on_even_where_both_have_a_row(tmp_path: Path):
    train, test = (
        write(tmp_path / "train.jsonl", ROWS),
        write(tmp_path / "test.jsonl", ROWS[:4] + [{**ROWS[0], "prompt": "1"}]),
    )
    tasks = mixture(rows(train, test))
    heldout = [p.question for p in tasks.heldout(5)]
    assert heldout == [*(row["prompt"] for row in ROWS[:4]), "1"]
    assert {tasks.train(i).question for i in range(36)} == {row["prompt"] for row in ROWS[4:]}
    tasks.check_disjoint(100, 5)
    with pytest.raises(
        UserError, match="has 5 distinct held-out questions in its first 5 items, 6 are wanted: .*hold out"
    ):
        tasks.heldout(6)


def test_a_verifiers_processes_get_the_environment_variables_that_paths_name():
    named = rows("$AXL_DATA/a.jsonl", "${OTHER}/b.jsonl", template="costs $price")
    other = rows("$MORE/c.jsonl").set(label="other")
    tasks = TaskMixture.Config(families=(named, other))
    assert ReasoningGymScorer.Config(mixture=tasks).environment() == ("AXL_DATA", "MORE", "OTHER")


def test_messages_and_templates():
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], "answer": 4}
    cfg = TaskRows.Config(
        rows=RowFunction.Config(function=as_given, arguments={"table": [chat]}),
        columns=Columns.Config(messages="messages"),
    )
    problem = mixture(cfg, heldout_every=10**9).train(0)
    assert problem.messages == tuple(chat["messages"]) and problem.answer == "4"
    assert TOKENIZER.decode(encode_problem(problem, TOKENIZER)) == "Be brief.\n\n2+2?\n"
    filled = cfg.clone(columns=Columns.Config(template="Q: {messages[1][content]}\nA:", system="Help."))
    problem = mixture(filled, heldout_every=10**9).train(0)
    assert problem.question == "Q: 2+2?\nA:" and problem.messages is not None
    assert [m["content"] for m in problem.messages] == ["Help.", "Q: 2+2?\nA:"]


def as_given(table: list[Any]) -> list[Any]:
    """The rows given."""
    return table


def failing() -> Iterator[dict[str, Any]]:
    """One row, and an error of the user's."""
    yield ROWS[0]
    raise KeyError("field")


NAMED = {"answer": "answer"}


@pytest.mark.parametrize(
    ("lines", "columns", "message"),
    [
        (['{"prompt": "a", "answer": "b"}', '{"prompt": "a", '], {}, r"rows.jsonl, line 2 is not JSON"),
        (['{"prompt": "a", "anwser": "b"}'], {}, r"line 1: rl needs .*; did you mean answer='anwser'"),
        (['{"prompt": "a", "anwser": "b"}'], NAMED, r"line 1: there is no field 'answer'; did you mean 'anwser'"),
        (
            ['{"prompt": 3, "answer": "b"}'],
            {},
            r"line 1: rl needs .*; the columns are prompt \(number\), answer \(text",
        ),
        (['{"prompt": 3, "answer": "b"}'], NAMED, r"line 1: expected field 'prompt' to be text, got 3 \(int\)"),
        (
            ['{"prompt": "a", "answer": ["b"]}'],
            NAMED,
            r"line 1: expected field 'answer' to be text or a finite number, got \['b'\]",
        ),
        (['{"prompt": " ", "answer": "b"}'], {}, r"line 1: the prompt is empty"),
        ([], {}, r"rows.jsonl is empty"),
        ([""], {}, r"has no rows"),
        (['{"prompt": "a", "answer": 1, "n": 1}'] * 2, {"id": "n"}, r"line 2: the id '1' is also that of .*line 1"),
        (['{"prompt": "a", "answer": 1, "n": 1.5}'], {"id": "n"}, r"expected field 'n' to be text or a whole number"),
        (["[1, 2]"], {}, r"line 1: expected a JSON object"),
        (
            ['{"prompt": "a"}'],
            {"template": "{promt}", "answer": None},
            r"template: there is no field 'promt'; did you mean",
        ),
        (['{"m": []}'], {"messages": "m", "answer": None}, r"field 'm': there is no message"),
        (['{"m": "hi"}'], {"messages": "m", "answer": None}, r"field 'm': expected a list of messages"),
        (['{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}'], NAMED, r"; messages='prompt' reads a list"),
        (['{"m": [{"role": "user", "content": [{"type": "image"}]}]}'], {"messages": "m"}, r"images are not read"),
        (['{"m": [{"role": "assistant", "content": "x"}]}'], {"messages": "m"}, r"there is nothing to answer"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_file_line_and_field(
    lines: list[str], columns: dict[str, Any], message: str, tmp_path: Path
):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n" * bool(lines))
    with pytest.raises(UserError, match=message):
        mixture(rows(str(path), **columns))


def test_other_sources_that_cannot_be_read_are_named(tmp_path: Path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "x.arrow").write_bytes(b"nothing")
    (tmp_path / "x.tab").write_text("a,b")
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "test.jsonl", ROWS)
    for name, message in {
        "x.parquet": "is not a Parquet file",
        "x.arrow": "is not a whole Arrow file",
        "x.tab": "expected a name that ends with one of .jsonl",
        "hub": "has no files of a split 'train'; known: test",
        "none.jsonl": "no file matches",
    }.items():
        with pytest.raises(UserError, match=message):
            mixture(rows(str(tmp_path / name)))
    for table, message in (
        (3, "expected an iterable of rows"),
        ([3], "row 0: expected a mapping"),
        ([{"prompt": "a", "answer": b"x"}], "answer"),
    ):
        with pytest.raises(UserError, match=message):
            mixture(TaskRows.Config(rows=RowFunction.Config(function=as_given, arguments={"table": table})))
    with pytest.raises(UserError, match=r"failing\(\) raised KeyError at row 1: 'field'"):
        mixture(TaskRows.Config(rows=RowFunction.Config(function=failing)))
    with pytest.raises(UserError, match=r"families: expected sources of problems"):
        mixture(Columns.Config())


def test_answers_are_compared_as_texts_and_as_numbers():
    assert (
        same_answer("72", "72") and same_answer("1,000", "1000") and same_answer("$5.0.", "5") and same_answer("b", "b")
    )
    assert not any(same_answer(*pair) for pair in (("", ""), ("7 2", "72"), ("B", "b"), ("1e3", "1000"), ("x", "1")))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_numbers_keep_the_value_that_a_file_means(tmp_path: Path, form: str):
    import pyarrow
    import pyarrow.parquet

    narrow = {"float32": pyarrow.float32(), "float16": pyarrow.float16(), "float64": pyarrow.float64()}
    wanted = ["0.1", "3.14", "-2.5", "1000", "0.00012", "72"]
    columns: dict[str, Any] = {name: pyarrow.array(np.array(wanted, name), kind) for name, kind in narrow.items()}
    columns["inside"] = pyarrow.array([[{"x": 0.1}]] * 6, pyarrow.list_(pyarrow.struct([("x", pyarrow.float32())])))
    columns["money"] = pyarrow.array([Decimal("18.90")] * 6, pyarrow.decimal128(10, 2))
    table = pyarrow.table({"prompt": [f"question {n}" for n in range(6)], **columns})
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table)
    for name in narrow:
        tasks = mixture(rows(str(file), answer=name, template=None), heldout_every=10**9)
        problems = {problem.question: problem for problem in (tasks.train(n) for n in range(6))}
        for number, text in enumerate(wanted):
            problem = problems[f"question {number}"]
            assert tasks.score(problem, text) == 1.0, (name, problem.answer)
            assert "e" not in problem.answer and len(problem.answer) < 9
    first = mixture(rows(str(file), answer="money"), heldout_every=10**9).train(0)
    assert first.answer == "18.90" and first.entry["inside"] == [{"x": 0.1}]


def test_times_in_nanoseconds_are_texts_wherever_they_stand(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet

    time, said = pa.time64("ns"), "00:00:00.000000001"
    columns = {
        "answer": pa.array([1], time),
        "listed": pa.array([[1]], pa.list_(time)),
        "inside": pa.array([{"at": 1}], pa.struct([("at", time)])),
        "mapped": pa.array([[("at", 1)]], pa.map_(pa.string(), time)),
        "passed": pa.array([1], pa.duration("ns")),
        "far": pa.array([1 << 62], pa.timestamp("us")),
    }
    pyarrow.parquet.write_table(pa.table({"prompt": ["when?"], **columns}), tmp_path / "a.parquet")
    first = mixture(rows(str(tmp_path / "a.parquet"), answer="answer"), heldout_every=10**9).train(0)
    assert first.answer == said and first.entry["listed"] == [said] and first.entry["inside"] == {"at": said}
    assert first.entry["passed"] == "1" and "4611686018427387904" in first.entry["far"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "true", "null", "[1]"])
def test_what_is_no_finite_number_is_no_reference(tmp_path: Path, value: str):
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "x", "answer": 1}}\n{{"prompt": "y", "answer": {value}}}\n')
    with pytest.raises(InputError, match=r"line 2: expected field 'answer' to be text or a finite number, got "):
        mixture(rows(str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize("value, text", [(np.float32(0.1), "0.1"), (np.int64(7), "7"), (1e16, "10000000000000000")])
def test_numbers_of_functions_keep_their_value(value: Any, text: str):
    cfg = TaskRows.Config(rows=RowFunction.Config(function=one_row, arguments={}), label="one")
    ANSWER.append(value)
    try:
        assert mixture(cfg, heldout_every=10**9).train(0).answer == text
    finally:
        ANSWER.clear()


ANSWER: list[Any] = []


def one_row() -> list[dict[str, Any]]:
    return [{"prompt": "x", "answer": ANSWER[0], "array": np.array([0.1], np.float32)}]


def test_every_row_of_a_held_out_table_is_asked(tmp_path: Path):
    """Rows with the same question are different rows: another answer, other roles, or written twice."""
    chats = [
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    ]
    table = [{"messages": chat, "answer": answer} for chat in chats for answer in (1, 2, 2)]
    source = RowFunction.Config(function=as_given, arguments={"table": table})
    cfg = TaskRows.Config(rows=source, heldout=source.clone(), columns=Columns.Config(messages="messages"))
    asked = mixture(cfg).for_evaluation(None, 3)
    assert len(asked) == 6 and len({problem.id for problem in asked}) == 6
    assert len(mixture(cfg).for_evaluation(4, 3)) == 4
