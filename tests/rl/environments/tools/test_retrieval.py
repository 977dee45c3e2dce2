"""Retrieval as a tool: what an episode is shown, of its tenants' passages and its own, and what never."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import ConfigBase, ConfigError
from mesh import UserError
from rl.environments.retrieval.embedding import FunctionEmbedder
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.retrieval import RetrievalTool
from rl.tasks.rows.sources import RowFunction

TEXTS = ("The cat sat.", "A dog sat on the cat", "Fish swim; fish eat fish.", "")
WORDS = "cat dog fish bird".split()
PASSAGES = (
    {"text": "cat of ann", "who": "user:ann", "answer_key": False},
    {"text": "cat of bob", "who": ["user:bob", "user:cy"], "answer_key": False},
    {"text": "cat of all", "who": "*", "answer_key": False},
    {"text": "cat of the test set", "who": "*", "answer_key": True},
)


def corpus() -> list[dict[str, Any]]:
    return [{"title": f"t{n}", "text": text} for n, text in enumerate(TEXTS)]


def shared(**changes: Any) -> list[dict[str, Any]]:
    return [row | changes for row in PASSAGES]


def counts(texts: list[str]) -> list[list[float]]:
    asked.extend(texts)
    return [[0.1 + text.count(word) for word in WORDS] for text in texts]


asked: list[str] = []
BY_COUNTS = FunctionEmbedder.Config(function=counts)
EMBEDDERS = pytest.mark.parametrize("embedder", [None, BY_COUNTS], ids=["words", "vectors"])


def tool_of(embedder: ConfigBase[Any] | None, **changes: Any) -> RetrievalTool.Config:
    rows = RowFunction.Config(function=shared)
    cfg = RetrievalTool.Config(rows=rows, access="who", hidden="answer_key", tenants=("user",), passages=9)
    return cfg.set(embedder=embedder, **changes)


def shown(tool: Any, row: Mapping[str, Any], query: str = "cat") -> set[str]:
    opened = tool.open(row)
    try:
        return set(opened.call(query=query).split("\n\n"))
    finally:
        opened.close()


def test_passages_are_shown_with_their_headings():
    cfg = RetrievalTool.Config(rows=RowFunction.Config(function=corpus), heading="title", passages=2)
    tool = cfg.build()
    assert tool.call(query="cat") == "t0\nThe cat sat.\n\nt1\nA dog sat on the cat"
    assert tool.call(query="t2") == "t2\nFish swim; fish eat fish."
    assert tool.call(query="unicorn") == "nothing found"
    with pytest.raises(UserError, match="row 0 has no text 'txt'.*text"):
        cfg.clone(text="txt").build()


@EMBEDDERS
def test_an_episode_sees_its_tenants_passages_and_those_of_everyone_and_hidden_ones_never(embedder: Any):
    tool = tool_of(embedder).build()
    assert shown(tool, {"user": "ann"}) == {"cat of ann", "cat of all"}
    assert shown(tool, {"user": ["bob", "ann"]}) == {"cat of ann", "cat of bob", "cat of all"}
    assert shown(tool, {"user": "cy"}) == {"cat of bob", "cat of all"}
    assert shown(tool, {"user": "*"}) == shown(tool, {"user": ""}) == {"cat of all"}
    assert tool.call(query="cat") == "cat of all"
    with pytest.raises(
        UserError, match=r"RetrievalTool.tenants: the episode's row has no 'user'; did you mean 'users'"
    ):
        tool.open({"users": "ann"})


@EMBEDDERS
def test_passages_of_an_episode_end_with_it(embedder: Any):
    tool = tool_of(embedder, own="context").build()
    first = tool.open({"user": "ann", "context": ["cat of this episode", "dog of this episode"]})
    second = tool.open({"user": "ann", "context": ["cat of another"]})
    assert set(first.call(query="cat").split("\n\n")) >= {"cat of ann", "cat of all", "cat of this episode"}
    assert "episode" not in second.call(query="cat") and "cat of another" in second.call(query="cat")
    first.close()
    second.close()
    assert shown(tool, {"user": "ann", "context": []}) == {"cat of ann", "cat of all"}
    with pytest.raises(UserError, match="RetrievalTool.own: 'context' of the row has 7; expected texts"):
        tool.open({"user": "ann", "context": [7]})


def test_vectors_are_kept_in_a_file_as_long_as_passages_and_access_are_the_same(tmp_path: Path):
    path = tmp_path / "index"
    asked.clear()
    cfg = tool_of(BY_COUNTS, index_file=str(path))
    cfg.build()
    assert len(asked) == 3 and path.exists() and cfg.reaches() == (str(path),)
    asked.clear()
    assert shown(cfg.build(), {"user": "ann"}) == {"cat of ann", "cat of all"} and asked == ["cat"]
    with pytest.raises(UserError, match="is an index of"):
        cfg.clone(rows=RowFunction.Config(function=shared, arguments={"who": "*"})).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"who": None}, "RetrievalTool.access: .* row 0 has no tenants 'who'"),
        ({"who": ["user:ann", 3]}, "RetrievalTool.access: .* expected names"),
        ({"answer_key": None}, "RetrievalTool.hidden: .* row 0 has no true or false 'answer_key'"),
        ({"answer_key": True}, "there is no passage"),
    ],
)
def test_passages_without_access_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        tool_of(None, rows=RowFunction.Config(function=shared, arguments=changes)).build()


def test_fields_that_need_others_are_refused():
    with pytest.raises(ConfigError, match="tenants.*access"):
        tool_of(None, access=None).build()
    with pytest.raises(ConfigError, match="index_file.*an embedder"):
        tool_of(None, index_file="x").build()


def test_an_episode_of_the_environment_asks_as_its_user():
    environment = ToolEnvironment.Config(tools=(tool_of(BY_COUNTS),)).build()
    environment.reset({"user": "bob"})
    step = asyncio.run(environment.step("<tool>search: cat</tool>"))
    assert "cat of bob" in step.observation and "cat of ann" not in step.observation
    asyncio.run(environment.close())
