"""SQL as a tool: rows as text, nothing but reading, and an end to every query."""

import sqlite3
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError
from experiments.text_to_sql.tool import SQLTool
from rl.environments.tools.tool import Tool

SCRIPT = """
create table beds (ward text, free integer);
insert into beds values ('a', 3), ('b', null), ('c', 5);
"""


@pytest.fixture
def tool() -> Tool:
    return SQLTool.Config(script=SCRIPT, max_rows=2, seconds=0.1).build().open({})


def test_rows_are_lines(tool: Tool):
    assert tool.call("select * from beds order by ward") == "ward | free\na | 3\nb | NULL\n..."
    assert tool.call("select count(*) as n, sum(free) from beds") == "n | sum(free)\n3 | 8"
    assert (
        tool.call("with t(n) as (select 1 union all select n+1 from t where n<3) select max(n) from t") == "max(n)\n3"
    )
    assert tool.call("select x'00ff'") == "x'00ff'\nx'00ff'"


@pytest.mark.parametrize(
    "query",
    [
        "insert into beds values ('d', 1)",
        "update beds set free = 0",
        "delete from beds",
        "drop table beds",
        "create table t (x)",
        "attach 'other.db' as o",
        "pragma journal_mode",
        "vacuum into 'copy.db'",
        "select load_extension('x')",
        "select randomblob(3)",
        "select 1; select 2",
        "select nothing from beds",
        "selec",
        "select zeroblob(100000000)",
    ],
)
def test_nothing_but_reading(query: str, tool: Tool):
    with pytest.raises(sqlite3.Error):
        tool.call(query)
    assert tool.call("select count(*) from beds") == "count(*)\n3"


def test_a_query_that_never_ends_is_ended(tool: Tool):
    with pytest.raises(RuntimeError, match="not done after 0.1 s"):
        tool.call("with recursive t(n) as (select 1 union all select n+1 from t) select count(*) from t")
    assert tool.call("select 1") == "1\n1"


def test_databases_of_files_are_opened_for_reading(tmp_path: Path):
    path = tmp_path / "beds.db"
    made = sqlite3.connect(path)
    made.executescript(SCRIPT)
    made.close()
    before = path.read_bytes()
    for cfg, row in ((SQLTool.Config(database=str(path)), {}), (SQLTool.Config(field="db"), {"db": str(path)})):
        session = cfg.build().open(row)
        assert session.call("select free from beds limit 1") == "free\n3"
        with pytest.raises(sqlite3.Error):
            session.call("delete from beds")
        session.close()
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        SQLTool.Config(field="db").build().open({"db": str(tmp_path / "gone.db")})


def test_a_database_in_no_place_or_two_is_refused():
    for cfg in (SQLTool.Config(), SQLTool.Config(field="db", script=SCRIPT), SQLTool.Config(database="gone.db")):
        with pytest.raises(ConfigError, match="database"):
            cfg.check()
