"""Episodes in the forms of others, against schemas of those forms."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from mesh.errors import UserError
from rl.environments.calls import JsonCalls
from rl.evaluation.traces import as_atif, as_openai
from tools.cli import main

FORM = JsonCalls.Config().build()
CALLS = f"let me see {FORM.call('add', {'a': 2, 'b': 3})} {FORM.call('add', {'a': 4, 'b': 5})}"
ROW: dict[str, Any] = {
    "family": "sums",
    "question": "2+3, 4+5?",
    "answer": "5 and 9",
    "expected": "5, 9",
    "reward": 1.0,
    "status": "ok",
    "finish_reason": "stop",
    "version": 7,
    "ended": "done",
    "turn_rewards": [0.0, 0.0, 1.0],
    "messages": [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "2+3, 4+5?"},
        {"role": "assistant", "content": CALLS},
        {"role": "tool", "content": FORM.results(["5", "9"])},
        {"role": "assistant", "content": "<tool_call>{</tool_call>"},
        {"role": "tool", "content": "error: not JSON"},
        {"role": "assistant", "content": "5 and 9"},
    ],
}
PLAIN = {name: value for name, value in ROW.items() if name != "messages"}


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT = {"type": "string"}
# ATIF 1.6, as far as it is about text (https://harborframework.com/docs/trajectory-format).
STEP = closed(
    {"step_id": {"type": "integer", "minimum": 1}, "source": {"enum": ["system", "user", "agent"]}, "message": TEXT},
    tool_calls={
        "type": "array",
        "items": closed({"tool_call_id": TEXT, "function_name": TEXT, "arguments": {"type": "object"}}),
    },
    observation=closed({"results": {"type": "array", "items": closed({"content": TEXT}, source_call_id=TEXT)}}),
)
TRAJECTORY = closed(
    {
        "schema_version": {"const": "ATIF-v1.6"},
        "session_id": TEXT,
        "agent": closed({"name": TEXT, "version": TEXT}, model_name=TEXT),
        "steps": {"type": "array", "minItems": 1, "items": STEP},
    },
    final_metrics=closed({"total_steps": {"type": "integer"}}),
    extra={"type": "object"},
)


@pytest.mark.parametrize("row", [ROW, PLAIN])
def test_messages_are_those_of_openais_own_types(row: dict[str, Any]):
    messages = as_openai(row)["messages"]
    TypeAdapter(list[ChatCompletionMessageParam]).validate_python(messages)
    assert as_openai(row)["metadata"]["reward"] == 1.0


def test_calls_are_told_apart_and_have_their_results():
    _, _, called, first, second, broken, error, last = as_openai(ROW)["messages"]
    assert called["content"] == "let me see" and [one["id"] for one in called["tool_calls"]] == ["call_2_0", "call_2_1"]
    assert json.loads(called["tool_calls"][1]["function"]["arguments"]) == {"a": 4, "b": 5}
    assert (first, second["tool_call_id"], second["content"]) == (
        {"role": "tool", "tool_call_id": "call_2_0", "content": "5"},
        "call_2_1",
        "9",
    )
    assert broken == {"role": "assistant", "content": "<tool_call>{</tool_call>"}  # what is no call stays text
    assert error == {"role": "user", "content": "error: not JSON"} and last["content"] == "5 and 9"


def test_results_of_an_agent_keep_their_own_names():
    own = [
        ROW["messages"][2],
        {"role": "tool", "tool_call_id": "call_x", "content": "5"},
        {"role": "tool", "tool_call_id": "call_y", "content": "9"},
    ]
    called, *results = as_openai({**ROW, "messages": own})["messages"]
    assert (
        [one["id"] for one in called["tool_calls"]] == [one["tool_call_id"] for one in results] == ["call_x", "call_y"]
    )


@pytest.mark.parametrize("row", [ROW, PLAIN])
def test_a_trajectory_is_one_of_atif(row: dict[str, Any]):
    found = as_atif(row, "run/0")
    jsonschema.validate(found, TRAJECTORY)
    assert [step["step_id"] for step in found["steps"]] == list(range(1, len(found["steps"]) + 1))
    for step in found["steps"]:
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        assert {one["source_call_id"] for one in step.get("observation", {"results": ()})["results"]} <= calls
    if "messages" in row:
        assert [step["source"] for step in found["steps"]] == ["system", "user", "agent", "agent", "user", "agent"]


def test_a_run_and_an_evaluation_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "rollouts" / "step_10.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(PLAIN) + "\n")
    (tmp_path / "eval").mkdir()
    samples = {"question": "2+3, 4+5?", "expected": "5, 9", "samples": [ROW, PLAIN, PLAIN]}
    (tmp_path / "eval" / "samples.jsonl").write_text(json.dumps(samples) + "\n")
    for folder, form, count in (("run", "openai", 2), ("run", "atif", 2), ("eval", "atif", 3)):
        output = tmp_path / f"{folder}-{form}.jsonl"
        assert main(["report", str(tmp_path / folder), "--episodes", str(output), "--form", form]) == 0
        assert f"{count} episodes" in capsys.readouterr().out
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == count and all(("steps" if form == "atif" else "messages") in row for row in rows)
    with pytest.raises(UserError, match="has no rollouts"):
        from rl.evaluation.traces import write_episodes

        write_episodes(tmp_path, tmp_path / "none.jsonl", "atif")
