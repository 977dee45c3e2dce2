"""Tools behind both forms of calls: results, errors that the policy sees, state of an episode, and counts."""

import asyncio
import json
from typing import Any, override

import pytest

from axlearn_like.config import ConfigError
from rl.environments.calls import Call, JsonCalls, TextCalls
from rl.environments.environment import Step
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.calculator import Calculator
from rl.environments.tools.function import FunctionTool
from rl.environments.tools.tool import Tool
from rl.protocol.messages import Problem


async def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": a + b}


def shout(text: str) -> str:
    return text.upper() * 400


class Counter(Tool):
    """Counts its calls of an episode."""

    class Config(Tool.Config):
        name: str = "counter"

        @override
        def schema(self) -> dict[str, Any]:
            return {"type": "object", "properties": {}}

    closed = 0

    def __init__(self, cfg: Config):
        self._count = 0

    @override
    def open(self, row: Any) -> "Counter":
        return Counter(Counter.Config())

    @override
    def call(self) -> int:
        self._count += 1
        return self._count

    @override
    async def close(self) -> None:
        Counter.closed += self._count


TOOLS = (
    Calculator.Config(),
    FunctionTool.Config(function=add, pure=True),
    FunctionTool.Config(function=shout),
    Counter.Config(),
)


def play(cfg: ToolEnvironment.Config, *actions: str) -> tuple[list[Step], dict[str, float]]:
    environment = cfg.build(shared=cfg.share())

    async def episode() -> list[Step]:
        assert environment.reset({}) == ""
        steps = [await environment.step(action) for action in actions]
        await environment.close()
        return steps

    return asyncio.run(episode()), dict(environment.figures())


def test_calls_of_text():
    cfg = ToolEnvironment.Config(tools=TOOLS)
    steps, figures = play(
        cfg,
        "let me see <tool>calculator: 3*4</tool>",
        '<tool>add: {"a": 1, "b": 2}</tool>',
        "<tool>counter:</tool>",
        "<tool>counter: {}</tool>",
        "<tool>shout: aha</tool>",
        "<tool>calculater: 3</tool>",
        "<tool>calculator: 1/0</tool>",
        "<tool>add: 3</tool>",
        '<tool>add: {"a": 1}</tool>',
        "<tool>calculator 3</tool>",
        "12",
    )
    assert [step.observation for step in steps] == [
        "<result>12</result>",
        '<result>{"sum": 3}</result>',
        "<result>1</result>",
        "<result>2</result>",
        f"<result>{('AHA' * 400)[:1000]}...</result>",
        "<result>error: no tool 'calculater'; did you mean 'calculator'?</result>",
        "<result>error: ZeroDivisionError: Fraction(1, 0)</result>",
        "<result>error: expected a JSON object of a, b</result>",
        "<result>error: missing b</result>",
        "<result>error: expected <tool>NAME: INPUT</tool></result>",
        "",
    ]
    assert [step.done for step in steps] == [False] * 10 + [True]
    assert (figures["tool_calls"], figures["tool_errors"]) == (10, 5) and figures["tool_seconds"] >= 0
    assert Counter.closed == 2  # of two calls, by the one episode


def test_calls_of_json():
    form = JsonCalls.Config()
    action = form.build().call("add", {"a": 1, "b": 2})
    steps, figures = play(
        ToolEnvironment.Config(tools=TOOLS, calls=form),
        f"think {action} and {form.build().call('calculator', {'expression': '2*3'})}",
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}',
        "so 3",
    )
    assert steps[0].observation == '{"sum": 3}\n</tool_response>\n<tool_response>\n6'
    assert steps[1].observation.startswith("error: not JSON")
    assert steps[2].observation == 'error: expected {"name": ..., "arguments": {...}}'
    assert steps[3].observation == "error: </tool_call> is missing"
    assert steps[4] == Step(done=True) and figures["tool_errors"] == 3
    assert form.build().calls(action) == [Call("add", {"a": 1, "b": 2})]
    assert json.loads(action.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "add"


def test_the_problem_says_what_tools_there_are():
    problem = Problem(3, "toys", "how many?", "3", {})
    plain = ToolEnvironment.Config(tools=TOOLS[:2])
    assert plain.prepare(problem) == problem and plain.is_pure()
    assert not ToolEnvironment.Config(tools=TOOLS).is_pure()
    told = plain.clone(calls=TextCalls.Config(described=True)).prepare(problem)
    assert told.messages is not None and told.messages[1] == {"role": "user", "content": "how many?"}
    assert "add(a: integer, b: integer): Add two numbers." in told.messages[0]["content"]
    shown = plain.clone(calls=JsonCalls.Config()).prepare(problem)
    assert shown.tools is not None and [one["function"]["name"] for one in shown.tools] == ["calculator", "add"]


@pytest.mark.parametrize(("tools", "message"), [((), "different names"), ((TOOLS[0], TOOLS[0]), "different names")])
def test_tools_without_names_of_their_own_are_refused(tools: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        ToolEnvironment.Config(tools=tools).check()
