"""Partial execution changes nothing but the time, and the tools that it is good for."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, override

import pytest

from mesh import UserError
from rl.environments.calls import CallForm, FencedCalls, JsonCalls, TextCalls
from rl.environments.environment import Environment, Step
from rl.environments.streaming.events import Invalid
from rl.environments.streaming.reader import PartialExecution
from rl.environments.thread import EnvironmentThread
from rl.environments.tool_environment import Toolbox, ToolEnvironment
from rl.environments.tools.calculator import Calculator
from rl.environments.tools.function import FunctionTool
from rl.environments.tools.python import PythonTool
from rl.environments.tools.tool import Tool
from rl.verification.sandbox.sandbox import Sandbox

JSON, FENCED = JsonCalls.Config().build(), FencedCalls.Config().build()
calls: list[str] = []  # calls of `look`, in order


def look(key: str, times: int = 1) -> str:
    """Look up a key."""
    calls.append(key)
    time.sleep(0.02)
    if key == "none":
        raise KeyError(key)
    return f"<{key}>" * times


def changing(key: str) -> str:
    """Return something else at each call."""
    calls.append(key)
    return f"{key} {len(calls)}"


class Counter(Tool):
    """State of an episode without a way back."""

    class Config(Tool.Config):
        name: str = "counter"
        pure: bool = True

        @override
        def schema(self) -> dict[str, Any]:
            return {"type": "object", "properties": {}}

    def __init__(self, cfg: Config):
        self._count = 0

    @override
    def open(self, row: Any) -> "Counter":
        return Counter(Counter.Config())

    @override
    def call(self) -> str:
        self._count += 1
        return str(self._count)


TOOLS = (
    FunctionTool.Config(function=look, pure=True),
    FunctionTool.Config(name="write", function=look),
    Counter.Config(),
    Calculator.Config(),
    PythonTool.Config(sandbox=Sandbox.Config(processes=2, deadline_s=1.0)),
)


class Play:
    """Episodes of actions that come in pieces; `partial` None: tools wait for the whole action."""

    def __init__(self, form: CallForm.Config, partial: PartialExecution.Config | None, tools: Any = TOOLS):
        self.cfg = ToolEnvironment.Config(tools=tools, calls=form, partial=partial)
        self.box: Toolbox = self.cfg.share()

    def episode(self, actions: Sequence[str], piece: int = 7) -> tuple[list[Step], dict[str, float], list[Invalid]]:
        thread = EnvironmentThread(lambda: self.cfg.build(shared=self.box), 5.0, "episode")
        steps, refused = list[Step](), list[Invalid]()
        thread.call(lambda environment: environment.reset({})).result(10)
        for action in actions:
            reader, found = self.cfg.reader(self.box, thread.call, {}), None
            for at in range(0, len(action), piece):
                found = None if reader is None else reader.read(action[at : at + piece])
                if found is not None:
                    refused.append(found)
                    break
            steps.append(thread.call(lambda one, act=action, bad=found: _step(one, act, bad)).result(20))
        figures = thread.call(lambda one: dict(one.figures())).result(10)
        thread.close()
        assert thread.join(10)
        return steps, figures, refused


def _step(environment: Environment, action: str, invalid: Invalid | None) -> Any:
    return environment.step(action) if invalid is None else environment.refuse(action[: invalid.end], invalid.why)


ON = PartialExecution.Config(recheck_every=0)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    calls.clear()
    yield


def several(*arguments: tuple[str, dict[str, Any]]) -> str:
    return " and ".join(JSON.call(tool, values) for tool, values in arguments)


ACTIONS = {
    "calls": several(("look", {"key": "a"}), ("look", {"key": "b", "times": 2}), ("calculator", {"expression": "2*3"})),
    "errors": several(
        ("look", {"key": "none"}), ("look", {}), ("lok", {"key": "a"}), ("calculator", {"expression": "x"})
    ),
    "state": several(("counter", {}), ("look", {"key": "c"}), ("counter", {}), ("write", {"key": "w"})),
    "code": several(("python", {"code": "x = 1\nx += 1\nprint(x)\nx"}), ("python", {"code": "x += 5\nx"})),
    "mixed": several(("python", {"code": "y = [1]\ny.append(2)\n1 / 0\ny = 0"}), ("look", {"key": 'é\n"q"'})),
    "broken": '<tool_call>{"name": "look", "arguments": {"key": "a"}} </tool_call><tool_call>{"name": "look", "argum',
    "syntax": several(("python", {"code": "x = 9\ndef f(:\n"}), ("python", {"code": "x"})),
    "twice": '<tool_call>{"name": "look", "arguments": {"key": "a"}, "arguments": {"key": "b"}}</tool_call>',
    "late": several(("python", {"code": "x = 7\nwhile True:\n    pass\nx = 8"}), ("python", {"code": "x"})),
    "end": "The answer.",
}


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_observations_are_those_of_tools_that_wait(piece: int) -> None:
    order = ["calls", "errors", "code", "state", "mixed", "broken", "code", "syntax", "twice", "late", "end"]
    actions = [ACTIONS[name] for name in order]
    expected, waited, _ = Play(JsonCalls.Config(), None).episode(actions)
    lazily, _ = list(calls), calls.clear()
    found, figures, refused = Play(JsonCalls.Config(), ON).episode(actions, piece)
    assert found == expected and not refused
    assert (figures["tool_calls"], figures["tool_errors"]) == (waited["tool_calls"], waited["tool_errors"])
    assert figures["partial_calls"] >= 9 and figures["partial_discarded"] > 0
    assert [call for call in calls if call == "w"] == ["w"] and set(calls) == set(lazily)


def test_fenced_code_runs_by_statements_and_is_dropped_where_the_action_says_something_else() -> None:
    blocks = [FENCED.call("python", {"code": f"a = {n}\nfor i in range(3):\n    a += i\nprint(a)"}) for n in (1, 2)]
    actions = [blocks[0], "\n".join(blocks), FENCED.call("python", {"code": "a"})]
    expected, _, _ = Play(FencedCalls.Config(), None).episode(actions)
    found, figures, _ = Play(FencedCalls.Config(), ON).episode(actions, 3)
    assert found == expected and figures["partial_calls"] == 3
    play = Play(FencedCalls.Config(), ON)
    thread = EnvironmentThread(lambda: play.cfg.build(shared=play.box), 5.0, "episode")
    reader = play.cfg.reader(play.box, thread.call, {})
    assert reader is not None
    reader.read("```python\na = 5\nb = 1\n")
    steps = [
        thread.call(lambda one, act=act: one.step(act)).result(10) for act in ("```python\na = 6\n\n```", *actions[2:])
    ]
    thread.close()
    assert steps[1].observation.strip().split("\n")[1] == "6"


def test_slow_tools_have_answered_before_the_action_is_whole() -> None:
    play = Play(JsonCalls.Config(), ON)
    thread = EnvironmentThread(lambda: play.cfg.build(shared=play.box), 5.0, "episode")
    reader = play.cfg.reader(play.box, thread.call, {})
    assert reader is not None
    reader.read(several(("look", {"key": "a"})))
    thread.call(lambda one: None).result(5)
    assert calls == ["a"]
    step = thread.call(lambda one: one.step(several(("look", {"key": "a"}), ("look", {"key": "z"})))).result(5)
    assert "<a>" in step.observation and calls == ["a", "z"]
    figures = thread.call(lambda one: dict(one.figures())).result(5)
    thread.close()
    assert figures["partial_calls"] == 1 and figures["partial_saved_seconds"] > 0.01


def test_a_result_is_used_for_the_very_arguments_alone() -> None:
    play = Play(JsonCalls.Config(), ON)
    thread = EnvironmentThread(lambda: play.cfg.build(shared=play.box), 5.0, "episode")
    reader = play.cfg.reader(play.box, thread.call, {})
    assert reader is not None
    reader.read(several(("look", {"key": "a"})))
    step = thread.call(lambda one: one.step(several(("look", {"key": "z"})))).result(5)
    thread.close()
    assert "<z>" in step.observation and "<a>" not in step.observation and calls == ["a", "z"]


@pytest.mark.parametrize(
    ("action", "end", "why"),
    [
        ('hm <tool_call>{"name": "lok", "arguments": {"key": "a"}}', '{"name": "lok"', "did you mean 'look'?"),
        ('<tool_call>{"name": "look", "arguments": {"kex": "a", "times": 1}}', '"kex": "a"', "unknown argument 'kex'"),
        ('<tool_call>{"name": "look" "arguments": {}}', '"look" "', "expected"),
        ('<tool_call>{"name": "python", "arguments": {"code": "x = 1\\ny = = 2\\nz = 3"}}', "= = 2\\n", "SyntaxError"),
    ],
)
@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_a_call_that_can_only_fail_ends_the_action_at_one_place(action: str, end: str, why: str, piece: int) -> None:
    play = Play(JsonCalls.Config(), PartialExecution.Config(abort_invalid=True))
    first = several(("look", {"key": "a"}))
    (step,), figures, (refused,) = play.episode([first + action], piece)
    assert (first + action)[: refused.end].endswith(end) and why in step.observation
    assert "<a>" in step.observation and figures["tool_errors"] == 1
    _, _, none = Play(JsonCalls.Config(), ON).episode([action], piece)
    assert not none


def test_a_tool_that_claims_to_be_pure_and_is_not_is_named_and_waits_from_then_on(caplog: Any) -> None:
    tools = (FunctionTool.Config(function=changing, pure=True), *TOOLS)
    play = Play(JsonCalls.Config(), PartialExecution.Config(recheck_every=2), tools)
    action = several(("changing", {"key": "a"}), ("look", {"key": "b"}))
    _, figures, _ = play.episode([action])
    assert play.box.ahead is not None and play.box.ahead.gains.impure == {"changing"}
    assert figures["partial_impure"] == 1 and figures["partial_off_changing"] == 1
    assert "'changing' claims to be pure" in caplog.text
    calls.clear()
    play.episode([several(("changing", {"key": "a"}))])
    assert calls == ["a"]


def test_a_tool_that_gains_nothing_is_run_ahead_no_more() -> None:
    play = Play(JsonCalls.Config(), ON, (Calculator.Config(), TOOLS[0]))
    assert play.box.ahead is not None
    for _ in range(40):
        play.episode([several(("calculator", {"expression": "1+1"}))], 1000)
    gains = play.box.ahead.gains
    for tool in ("calculator", "look"):
        for _ in range(16):
            gains.turn(tool, -1.0 if tool == "calculator" else 1.0)
    assert gains.off == {"calculator"} and not play.box.ahead.idle
    _, figures, _ = play.episode([several(("calculator", {"expression": "1+1"}))])
    assert figures["partial_calls"] == 0 and figures["partial_off_calculator"] == 1
    for _ in range(16):
        gains.turn("look", -2.0)
    thread = EnvironmentThread(lambda: play.cfg.build(shared=play.box), 5.0, "episode")
    assert play.cfg.reader(play.box, thread.call, {}) is None
    thread.close()


def test_fields_are_checked() -> None:
    with pytest.raises(UserError, match="recheck_every"):
        PartialExecution.Config(recheck_every=-1).check_fields()
    assert isinstance(TextCalls.Config().build().events("<tool>look: a")[0].number, int)
