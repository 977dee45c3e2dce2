"""The forms of rows that people have are read by themselves, or with one named option, by RL, SFT and pairs.

The cases are those of the table in docs/how-to/bring-your-data.md, which has the sources.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from axlearn_like.config import ConfigBase
from axlearn_like.input import Chat, Document, InputError, PromptAnswer, StepLabels, UnpairedPreference
from axlearn_like.input.preferences import Preference
from axlearn_like.input.rows.examples import PairRows, SupervisedRows
from axlearn_like.input.rows.forms import find_form, form_of
from axlearn_like.input.rows.tables import read_rows
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh.errors import UserError
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.columns import form_columns
from rl.tasks.rows.datasets import rows
from tests.axlearn_like.input.test_chat import tokenizer

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "bring-your-data.md"
BYTES = ByteTokenizer.Config().build()
QUESTION, ANSWER, WRONG = "What is 1 + 1?", "It is 2.", "It is 11."
ASKED = [{"role": "user", "content": QUESTION}]
SAID = [{"role": "assistant", "content": ANSWER}]
SAID_WRONG = [{"role": "assistant", "content": WRONG}]
BRIEF = [{"role": "system", "content": "Be brief."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADD = {"name": "add", "arguments": {"a": 1, "b": 1}}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": ADD}]}
CALLED = [*ASKED, CALLING, {"role": "tool", "content": "2"}]
TEXTS = {"prompt": QUESTION, "chosen": ANSWER, "rejected": WRONG}


def turn(role: str, text: str) -> dict[str, str]:
    """A turn of ShareGPT."""
    return {"from": role, "value": text}


class Case(NamedTuple):
    """A row, and what each job reads of it; None: the job refuses it."""

    row: Mapping[str, Any]
    rl: tuple[Sequence[Mapping[str, Any]], str] | None = None  # messages, answer
    sft: Sequence[Mapping[str, Any]] | None = None  # conversation
    pairs: Sequence[Mapping[str, Any]] | None = None  # prompt
    tools: Sequence[Mapping[str, Any]] | None = None


CASES = {
    "TRL, prompt and completion": Case(
        {"prompt": QUESTION, "completion": ANSWER}, rl=(ASKED, ANSWER), sft=[*ASKED, *SAID]
    ),
    "TRL, conversational prompt and completion": Case(
        {"prompt": [*BRIEF, *ASKED], "completion": SAID}, rl=([*BRIEF, *ASKED], ANSWER), sft=[*BRIEF, *ASKED, *SAID]
    ),
    "TRL, conversational prompt with a solution": Case(
        {"prompt": ASKED, "solution": ANSWER, "level": 1}, rl=(ASKED, ANSWER), sft=[*ASKED, *SAID]
    ),
    "TRL, messages": Case(
        {"messages": [*ASKED, *SAID, *ASKED, *SAID]}, rl=([*ASKED, *SAID, *ASKED], ANSWER), sft=[*ASKED, *SAID] * 2
    ),
    "TRL, preference": Case(TEXTS, rl=None, pairs=ASKED),
    "TRL, conversational preference": Case({"prompt": ASKED, "chosen": SAID, "rejected": SAID_WRONG}, pairs=ASKED),
    "TRL, conversational preference, implicit prompt": Case(
        {"chosen": [*ASKED, *SAID], "rejected": [*ASKED, *SAID_WRONG]}, pairs=ASKED
    ),
    "verl": Case(
        {
            "data_source": "openai/gsm8k",
            "prompt": ASKED,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ANSWER},
            "extra_info": {"split": "train", "index": 0, "answer": "1 + 1 is 2"},
        },
        rl=(ASKED, ANSWER),
        sft=[*ASKED, *SAID],
    ),
    "verifiers and prime-rl, question": Case(
        {"question": QUESTION, "answer": ANSWER, "info": '{"level": 3}'}, rl=(ASKED, ANSWER), sft=[*ASKED, *SAID]
    ),
    "verifiers and prime-rl, prompt": Case(
        {"prompt": [*BRIEF, *ASKED], "answer": ANSWER, "info": {"level": 3}, "task": "sums"},
        rl=([*BRIEF, *ASKED], ANSWER),
        sft=[*BRIEF, *ASKED, *SAID],
    ),
    "OpenAI, messages": Case(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": part} for part in (QUESTION[:5], QUESTION[5:])]},
                {**CALLING, "content": None},
                {"role": "tool", "content": "2", "name": None},
                *SAID,
            ],
            "tools": TOOLS,
            "parallel_tool_calls": False,
        },
        rl=(CALLED, ANSWER),
        sft=[*CALLED, *SAID],
        tools=TOOLS,
    ),
    "OpenAI, preference": Case(
        {
            "input": {"messages": ASKED, "tools": TOOLS, "parallel_tool_calls": True},
            "preferred_output": SAID,
            "non_preferred_output": SAID_WRONG,
        },
        pairs=ASKED,
        tools=TOOLS,
    ),
    "ShareGPT": Case(
        {
            "conversations": [
                turn("human", QUESTION),
                turn("function_call", json.dumps(ADD)),
                turn("observation", "2"),
                turn("gpt", ANSWER),
            ],
            "system": "Be brief.",
            "tools": json.dumps(TOOLS),
        },
        rl=([*BRIEF, *CALLED], ANSWER),
        sft=[*BRIEF, *CALLED, *SAID],
        tools=TOOLS,
    ),
    "ShareGPT, preference": Case(
        {"conversations": [turn("human", QUESTION)], "chosen": turn("gpt", ANSWER), "rejected": turn("gpt", WRONG)},
        pairs=ASKED,
    ),
    "Alpaca": Case(
        {"instruction": "What is", "input": "1 + 1?", "output": ANSWER},
        rl=([{"role": "user", "content": "What is\n1 + 1?"}], ANSWER),
        sft=[{"role": "user", "content": "What is\n1 + 1?"}, *SAID],
    ),
    "Alpaca, preference": Case(
        {"instruction": QUESTION, "input": "", "chosen": ANSWER, "rejected": WRONG}, pairs=ASKED
    ),
}
# Forms that need one option, named so in the table.
NAMED: dict[str, tuple[Mapping[str, Any], ConfigBase[Any]]] = {
    "TRL, unpaired preference": (
        {"prompt": QUESTION, "completion": ANSWER, "label": True},
        UnpairedPreference.Config(),
    ),
    "TRL, stepwise supervision": (
        {"prompt": QUESTION, "completions": ["1 + 1", "2"], "labels": [True, False]},
        StepLabels.Config(),
    ),
}


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def decided(case: Mapping[str, Any]) -> Any:
    return form_of([(case, "line 1"), (case, "line 2")])


def test_the_table_of_the_page_has_all_forms() -> None:
    table = re.findall(r"^\| ([^|`]+?) \| `[^|]*\| ([^|]+?) \|$", PAGE.read_text(), re.MULTILINE)
    by_itself = {name for name, how in table if how.startswith("by itself")}
    assert by_itself == {*CASES, "TRL, text", "TRL, preference, implicit prompt"}
    named = {name: how for name, how in table if name not in by_itself and name in NAMED}
    assert named.keys() == NAMED.keys()
    assert all(how == f"`example={type(NAMED[name][1]).__qualname__}()`" for name, how in named.items())


@pytest.mark.parametrize("name", CASES)
def test_rl_reads_a_form(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    files = lines(tmp_path / "a.jsonl", case.row, {**case.row, "other": 1})
    if case.rl is None:
        with pytest.raises(UserError, match=r"rl needs a question .*; the columns are "):
            TaskMixture.Config(families=(rows(files),)).build()
        return
    problem = TaskMixture.Config(families=(rows(files).set(label="x"),), heldout_every=10**9).build().problem(0)
    said = problem.messages or ({"role": "user", "content": problem.question},)
    assert (list(map(dict, said)), problem.answer) == (list(case.rl[0]), case.rl[1])
    assert problem.tools == (None if case.tools is None else tuple(case.tools))
    assert problem.entry == case.row


@pytest.mark.parametrize("name", CASES)
def test_supervised_fine_tuning_reads_a_form(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    files, cache = lines(tmp_path / "a.jsonl", case.row), str(tmp_path / "cache")
    source = SupervisedRows.Config(files=files, tokenizer=tokenizer("qwen25"), cache=cache)
    if case.sft is None:
        with pytest.raises(UserError, match=r"sft needs messages.*; the columns are .*; pairs.* can read them"):
            source.build()
        return
    found = source.build()[0]
    record = {"messages": case.sft, "tools": case.tools}
    chat = Chat.Config(tools="tools").build(tokenizer=tokenizer("qwen25").build())
    ids, learned = chat.encode(record, "line 1")
    assert found["tokens"].tolist() == list(ids)
    assert found["loss_mask"].tolist() == list(learned)


@pytest.mark.parametrize("name", CASES)
def test_pairs_read_a_form(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = PairRows.Config(files=lines(tmp_path / "a.jsonl", case.row), tokenizer=tokenizer("qwen25"))
    if case.pairs is None:
        with pytest.raises(UserError, match=r"pairs needs chosen and rejected.*; the columns are .* can read them"):
            source.build()
        return
    found, built = source.build()[0], tokenizer("qwen25").build()
    record = {"prompt": case.pairs, "chosen": SAID, "rejected": SAID_WRONG, "tools": case.tools}
    expected = Preference.Config(tools="tools").build(tokenizer=built).encode(record, "line 1")
    assert found.keys() == expected.keys()
    for array, right in expected.items():
        np.testing.assert_array_equal(found[array], right)


@pytest.mark.parametrize("name", NAMED)
def test_a_form_is_read_with_one_named_option(name: str, tmp_path: Path) -> None:
    row, example = NAMED[name]
    files = lines(tmp_path / "a.jsonl", row, {**row, "prompt": "Another?"})
    source = PairRows.Config(files=files, tokenizer=ByteTokenizer.Config(), example=example).build()
    assert len(source) == 2 and QUESTION.encode() in bytes(t for t in source[0]["tokens"].tolist() if t < 256)


def test_plain_texts_without_a_template(tmp_path: Path) -> None:
    """TRL's language modelling, and pairs whose prompt is what both begin with: whole words."""
    cache = str(tmp_path / "cache")

    def source(row: Mapping[str, Any]) -> Any:
        files = lines(tmp_path / "a.jsonl", row)
        return (
            SupervisedRows.Config(files=files, tokenizer=ByteTokenizer.Config(), cache=cache)
            .build()[0]["tokens"]
            .tolist()
        )

    expected = Document.Config().build(tokenizer=BYTES).encode({"text": ANSWER}, "")[0]
    assert source({"text": ANSWER}) == list(expected)
    asked = PromptAnswer.Config(prompt="p", answer="a").build(tokenizer=BYTES).encode({"p": QUESTION, "a": ANSWER}, "")
    assert source({"prompt": QUESTION, "completion": ANSWER}) == list(asked[0])
    texts = {"chosen": "The sky is blue.", "rejected": "The sky is black."}
    pair = PairRows.Config(files=lines(tmp_path / "b.jsonl", texts), tokenizer=ByteTokenizer.Config()).build()[0]
    for side, text in ((1, b" blue."), (-1, b" black.")):
        drawn = pair["tokens"][pair["sides"] == side].tolist()
        assert bytes(drawn[:-1]) == text and drawn[-1] == BYTES.eos
    given = pair["tokens"][pair["sides"] == 0].tolist()
    assert bytes(t for t in given if t < 256) == b"The sky is" * 2


def test_a_prompt_beside_answers_that_are_single_messages_is_kept() -> None:
    """Before, a prompt that is a text was lost where chosen and rejected were lists of one message each."""
    built = tokenizer("qwen25").build()
    encode = Preference.Config().build(tokenizer=built).encode
    found = encode({"prompt": QUESTION, "chosen": SAID, "rejected": SAID_WRONG}, "line 1")
    expected = encode({"prompt": ASKED, "chosen": SAID, "rejected": SAID_WRONG}, "line 1")
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])


def test_a_turn_of_weight_0_is_not_learned() -> None:
    """OpenAI's fine-tuning marks turns so."""
    chat = Chat.Config().build(tokenizer=tokenizer("qwen25").build())
    said = [*ASKED, {**SAID_WRONG[0], "weight": 0}, *ASKED, {**SAID[0], "weight": 1}]
    ids, learned = chat.encode({"messages": said}, "line 1")
    kept = [token for token, mask in zip(ids, learned, strict=True) if mask]
    assert tokenizer("qwen25").build().decode(kept[:-1]) == ANSWER
    with pytest.raises(InputError, match="nothing is learned"):
        chat.encode({"messages": said[:2]}, "line 1")


ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(5)]


def tables(folder: Path) -> list[str]:
    """The rows in every format."""
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    pyarrow.feather.write_feather(table, str(folder / "a.feather"))
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    found = ["a.parquet", "a.feather"]
    separated = {}
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        out = io.StringIO()
        writer = csv.DictWriter(out, ["question", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
        separated[name] = out.getvalue()
    for name, content in {"jsonl": text, "ndjson": text, "json": json.dumps(ROWS), **separated}.items():
        for bom in (b"", b"\xef\xbb\xbf"):
            data = bom + content.encode()
            plain = f"a{'_bom' if bom else ''}.{name}"
            (folder / plain).write_bytes(data)
            (folder / f"{plain}.gz").write_bytes(gzip.compress(data))
            found += [plain, f"{plain}.gz"]
    (folder / "lines.json").write_text(text)  # as many files of the Hub are named
    return [str(folder / name) for name in (*found, "lines.json")]


def test_every_format_has_the_same_rows(tmp_path: Path) -> None:
    for name in tables(tmp_path):
        assert [dict(row) for row, _ in read_rows(Path(name))] == ROWS, name
        form = find_form(name)
        assert (form.prompt, form.answer, form.jobs) == ("question", "answer", ("sft", "rl")), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1\n", r"line 2: expected 2 values, one for each column, got 1"),
        ('a,b\n"x,2\n', r"line 2: unexpected end of data"),
        ("a,a\n1,2\n", r"line 1: expected a name for each column, all different"),
        ("a,\n1,2\n", r"line 1: expected a name for each column"),
    ],
)
def test_damaged_tables_are_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_rows(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text('a,b\n"two\nlines, and ""more""",\n\n')
    assert [row for row, _ in read_rows(tmp_path / "b.csv")] == [{"a": 'two\nlines, and "more"', "b": ""}]


def test_columns_that_nobody_names_are_left(tmp_path: Path) -> None:
    """Bytes, a picture and a duration, beside a time in nanoseconds, which is read as a text."""
    import pyarrow as pa
    import pyarrow.parquet

    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "question": [row["question"] for row in ROWS],
            "answer": [row["answer"] for row in ROWS],
            "raw": pa.array([b"\xff\x00"] * 5),
            "image": pa.array([{"bytes": b"\x89PNG", "path": "a.png"}] * 5, picture),
            "spent": pa.array([1500] * 5, pa.duration("ms")),
            "fine": pa.array([1001] * 5, pa.timestamp("ns")),
            "nested": pa.array([[{"x": [1.5]}]] * 5),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    form = find_form(str(tmp_path / "a.parquet"))
    assert form.left == ("raw", "image", "spent", "fine", "nested")
    tasks = TaskMixture.Config(families=(rows(str(tmp_path / "a.parquet")).set(label="x"),)).build()
    assert tasks.problem(0).entry.keys() == {"question", "answer", "fine", "nested"}
    source = SupervisedRows.Config(
        files=str(tmp_path / "a.parquet"), tokenizer=tokenizer("qwen25"), cache=str(tmp_path / "c")
    )
    assert len(source.build()) == 5


def test_messages_of_parquet_are_those_of_json(tmp_path: Path) -> None:
    """Arrow fills what a message does not have with null, which templates would take for a value."""
    import pyarrow
    import pyarrow.parquet

    row = CASES["OpenAI, messages"].row
    texts = [{**one, "content": one.get("content") and ANSWER} for one in row["messages"]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": texts}]), tmp_path / "a.parquet")
    lines(tmp_path / "a.jsonl", {"messages": texts})
    ids = [
        SupervisedRows.Config(
            files=str(tmp_path / name), tokenizer=tokenizer("qwen25"), cache=str(tmp_path / "c")
        ).build()[0]
        for name in ("a.parquet", "a.jsonl")
    ]
    np.testing.assert_array_equal(ids[0]["tokens"], ids[1]["tokens"])


@pytest.mark.parametrize(
    ("row", "job", "message"),
    [
        (
            {"qestion": "a", "answer": "b"},
            "rl",
            r"columns are qestion \(text\), answer \(text\); did you mean prompt='qe",
        ),
        ({"body": "a", "n": 3}, "rl", r"body \(text\), n \(number\); name the columns, such as prompt='body'"),
        ({"prompt": "a", "image": {"bytes": "x"}}, "sft", r"prompt \(text\), image \(object\); rl can read them$"),
        ({"prompt": "a", "choosen": "b", "rejected": "c"}, "pairs", r"did you mean chosen='choosen'"),
        ({"m": [1]}, "rl", r"columns are m \(list\)$"),
    ],
)
def test_rows_of_no_known_form(row: Mapping[str, Any], job: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"^rows\.jsonl: .* needs .*" + message):
        decided(row).require(job, "rows.jsonl")


def test_columns_are_named(tmp_path: Path) -> None:
    files = lines(tmp_path / "a.jsonl", {"body": QUESTION, "meta": {"key": [1, "2"]}})
    form = find_form(files, prompt="body", answer="meta.key.-1")
    assert (form.parts, form.left) == ({"prompt": "body", "answer": "meta.key.-1"}, ())
    assert form_columns(form, files, reference=True).answer == "meta.key.-1"
    tasks = TaskMixture.Config(families=(rows(files, prompt="body", answer="meta.key.-1"),)).build()
    assert tasks.problem(0).answer == "2"
    with pytest.raises(InputError, match=r"line 1: there is no field 'bod'; did you mean 'body'"):
        find_form(files, prompt="bod")
    with pytest.raises(InputError, match=r"rows have no part 'promt'; did you mean 'prompt'"):
        find_form(files, promt="body")


def test_a_template_takes_fields_within_fields(tmp_path: Path) -> None:
    files = lines(tmp_path / "a.jsonl", {"extra": {"question": QUESTION, "hint": "add"}, "answer": "2"})
    tasks = TaskMixture.Config(families=(rows(files, template="{extra.question} ({extra[hint]})"),)).build()
    assert tasks.problem(0).question == f"{QUESTION} (add)"
