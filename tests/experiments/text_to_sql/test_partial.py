"""Queries that run while they are written: the same episodes as with queries that wait, and an end to hopeless ones."""

import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigError
from experiments.text_to_sql.partial import QueryChecker
from experiments.text_to_sql.tool import SQLTool, connect
from rl.environments.calls import CallForm, FencedCalls, JsonCalls, TextCalls
from rl.environments.streaming.reader import PartialExecution
from tests.rl.environments.streaming.test_partial import Play

SCRIPT = """
create table beds (ward text, free integer);
insert into beds values ('a', 3), ('b', null), ('c', 5);
create table wards (ward text, floor integer);
"""
ON, ABORT = PartialExecution.Config(recheck_every=0), PartialExecution.Config(abort_invalid=True)
FORMS: dict[str, CallForm.Config] = {
    "json": JsonCalls.Config(),
    "fenced": FencedCalls.Config(languages=("sql",)),
    "text": TextCalls.Config(),
}
QUERIES = (
    "select ward\nfrom beds\norder by free desc;\n",
    "select * from beds where free > 3;\n\n  \n",
    "select count(*) from beds;\n-- all of them\n",
    "select 1;\nselect 2",
    "select rent\nfrom beds;\n",
    ";",
    "with recursive t(n) as (select 1 union all select n+1 from t)\nselect count(*) from t;\n",
    "select max(free) from beds",
)
CHANGES = (
    "insert into beds values ('d', 9);\n",
    "select sum(free) from beds;\n",
    "update beds set free = 1;\nselect 1",
    "select sum(free) from beds;\n",
    "create table mine as\nselect * from beds where free > 3",
    "select count(*) from mine",
    "insert into mine with recursive t(n) as (select 1 union all select n+1 from t)\nselect n, n from t;\n",
    "drop table beds;\n",
    "select count(*) from mine; \n",
    "commit",
    "select * from beds",
)


def episode(tool: SQLTool.Config, form: CallForm.Config, partial: Any, queries: Sequence[str], piece: int = 5) -> Any:
    play = Play(form, partial, (tool,))
    actions = [f"{play.box.form.call('sql', {'query': query})} so" for query in queries]
    return play.episode(actions, piece)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("queries", "tool"),
    [
        (QUERIES, SQLTool.Config(script=SCRIPT, seconds=0.2)),
        (CHANGES, SQLTool.Config(script=SCRIPT, seconds=0.2, writable=True)),
    ],
)
def test_results_are_those_of_queries_that_wait(form: str, queries: Sequence[str], tool: SQLTool.Config) -> None:
    waited, figures, _ = episode(tool, FORMS[form], None, queries)
    found, ahead, refused = episode(tool, FORMS[form], ON, queries)
    assert found == waited and not refused and ahead["tool_errors"] == figures["tool_errors"]
    assert ahead["partial_calls"] >= len(queries) - 2
    rechecked, again, _ = episode(tool, FORMS[form], PartialExecution.Config(recheck_every=1), queries)
    assert rechecked == waited and again["partial_impure"] == 0


def test_changes_of_a_query_that_is_not_made_are_rolled_back() -> None:
    tool = SQLTool.Config(script=SCRIPT, writable=True).build().open({})
    for end in ("discard", "commit"):
        partial = tool.begin()
        assert partial is not None
        partial.feed("query", "update beds set free = 7;\n")
        assert tool.call("select max(free) from beds") == "max(free)\n7"
        if end == "commit":
            assert partial.finish(query="update beds set free = 7;") == ""
        getattr(partial, end)()
        assert tool.call("select max(free) from beds") == f"max(free)\n{5 if end == 'discard' else 7}"
    for refused in ("savepoint a", "begin", "pragma writable_schema = 1", "attach 'x.db' as x", "vacuum into 'x.db'",
                    "create temp table t (x)", "create virtual table t using fts5(x)"):  # fmt: skip
        with pytest.raises(sqlite3.Error):
            tool.call(refused)
    tool.close()


@pytest.mark.parametrize(
    ("query", "kept", "why"),
    [
        ("select free\nfrom rooms\nwhere free > 1\nand more", "where free > 1\n", "no such table: rooms"),
        ("select rent\nfrom beds\nwhere free > 1\nlimit 3", "where free > 1\n", "no such column: rent"),
        ("select free\nwhere from beds\nlimit 3", "where from beds\n", 'near "from": syntax error'),
        ("select floor from beds", "beds", "no such column: floor"),
        ("delete from beds", "beds", "not authorized"),
    ],
)
@pytest.mark.parametrize("form", ["json", "fenced"])
def test_a_hopeless_query_ends_its_action_where_it_is_certain_and_has_the_error_that_it_would_have(
    query: str, kept: str, why: str, form: str
) -> None:
    tool = SQLTool.Config(script=SCRIPT)
    (waited,), _, _ = episode(tool, FORMS[form], ON, [query])
    for piece in (1, 1000):
        (step,), figures, (refused,) = episode(tool, FORMS[form], ABORT, [query], piece)
        assert why in refused.why and why in step.observation and figures["tool_errors"] == 1
        action = FORMS[form].build().call("sql", {"query": query})
        assert action[: refused.end].replace("\\n", "\n").rstrip('"').endswith(kept)
    if form == "json":
        assert why in waited.observation


RUNNING = (
    "select floor from beds join wards using ( ward )",
    "select count ( * ) from main . beds as b where b . free is null ;",
    "select r . ward from ( select ward from beds where free > 1 ) as r , wards as w where w . floor = 1",
    "with a as ( select * from b ) , b as ( select 1 as x ) select x from a union select floor from wards",
    "select sum ( free ) over ( order by ward ) , ( select max ( floor ) from wards where floor > free ) from beds",
    "select sum ( free ) filter ( where free > 1 ) over w from beds as window window w as ( order by ward )",
    "explain query plan select 1 -- where",
    "select coalesce ( free , 1 ) as f from 'beds' where f in ( select floor from wards ) group by f order by f",
    "select ' from where ' from beds , wards on free = floor ; -- ;",
    "-- nothing",
    " ; ",
)


@pytest.mark.parametrize("query", RUNNING)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_may_become_a_query_is_left_alone_however_its_lines_end(query: str, data: Any) -> None:
    connection, words = connect(None, SCRIPT), query.split(" ")
    ends = data.draw(st.lists(st.sampled_from(" \n"), min_size=len(words), max_size=len(words)))
    text = "".join(map("".join, zip(words, ends, strict=True)))
    try:
        connection.execute(text)
    except sqlite3.Error:
        return  # a line ends within its comment
    checker = QueryChecker(connection)
    assert not any(checker.feed(line) for line in [*text.splitlines(keepends=True), ""])


def test_a_checker_that_raises_leaves_the_action_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = SQLTool.Config(field="db")
    play = Play(JsonCalls.Config(), ABORT, (cfg,))
    reader = play.cfg.reader(play.box, lambda call: None, {"db": "gone.db"})
    assert reader is not None
    with pytest.raises(FileNotFoundError):  # the engine counts it, and draws on without the reader
        reader.read('<tool_call>{"name": "sql", "arguments": {"query": "select 1"}}</tool_call>')


def test_files_are_never_writable() -> None:
    with pytest.raises(ConfigError, match="writable"):
        SQLTool.Config(field="db", writable=True).check()
