"""The environment of tools: actions with calls are answered by their results, one without a call ends the episode."""

import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

from axlearn_like.config import REQUIRED
from mesh.errors import did_you_mean
from rl.environments.calls import Call, CallForm, TextCalls, json_or
from rl.environments.environment import Environment, Row, Step
from rl.environments.streaming.ahead import Ahead, CallOutcome, outcome_of
from rl.environments.streaming.events import ArgumentPart, Event, Finished, Started
from rl.environments.streaming.gains import Gains
from rl.environments.streaming.reader import ActionReader, PartialExecution, Tools
from rl.environments.tools.schema import ArgumentError, checked_arguments
from rl.environments.tools.tool import Tool
from rl.protocol.messages import Problem


class Toolbox:
    """Tools, built, and the form of their calls: shared by the episodes of a process."""

    def __init__(self, tools: Sequence[Tool.Config], form: CallForm.Config, partial: PartialExecution.Config | None):
        self.form: CallForm = form.build()
        self.tools: dict[str, tuple[Tool.Config, Tool]] = {cfg.title(): (cfg, cfg.build()) for cfg in tools}
        self.ahead: Tools | None = None  # rules of calls that are run ahead
        if partial is not None:
            configs = {name: tool for name, (tool, _) in self.tools.items()}
            self.ahead = Tools(self.form.events, configs, Gains(partial.recheck_every), partial)

    def close(self) -> None:
        """Shut all tools down."""
        for _, tool in self.tools.values():
            tool.shutdown()


class ToolEnvironment(Environment):
    """Tools behind a form of calls. The last action is the answer, which the task's verifier judges.

    A call that cannot be read, names no tool or raises is answered by "error: ..." and counted. A result may have
    `max_result` characters; the rest is cut off.
    """

    class Config(Environment.Config):
        tools: tuple[Tool.Config, ...] = REQUIRED
        calls: CallForm.Config = TextCalls.Config()
        max_result: int = 1000
        partial: PartialExecution.Config | None = None  # run calls while they are drawn; None: when the action is whole
        verify: bool = True

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "max_result")
            names = [tool.title() for tool in self.tools]
            self.require("tools", bool(names) and len(set(names)) == len(names), "tools of different names")
            for tool in self.tools:
                tool.check_fields()

        @override
        def share(self) -> Toolbox:
            return Toolbox(self.tools, self.calls, self.partial)

        @override
        def reader(self, shared: Toolbox, tell: Callable[[Callable[[Any], Any]], Any], row: Row) -> ActionReader | None:
            if shared.ahead is None or shared.ahead.idle:
                return None
            return ActionReader(shared.ahead, lambda event: tell(lambda one: one.run_ahead(event)), row)

        @override
        def is_pure(self) -> bool:
            return all(tool.pure for tool in self.tools)

        @override
        def role(self) -> str:
            return self.calls.role()

        @override
        def stop_strings(self) -> tuple[str, ...]:
            return self.calls.stop_strings()

        @override
        def prepare(self, problem: Problem) -> Problem:
            functions = tuple(tool.described() for tool in self.tools)
            if self.calls.shows_schemas():
                return dataclasses.replace(problem, tools=functions)
            if not (about := self.calls.describe(functions)):
                return problem
            messages = problem.messages or ({"role": "user", "content": problem.question},)
            return dataclasses.replace(problem, messages=({"role": "system", "content": about}, *messages))

    def __init__(self, cfg: Config, *, shared: Toolbox | None = None):
        super().__init__(cfg)
        self._max_result = cfg.max_result
        self._owned = Toolbox(cfg.tools, cfg.calls, cfg.partial) if shared is None else None
        self._box: Toolbox = shared or self._owned  # pyright: ignore[reportAttributeAccessIssue]
        self._row: Row = {}
        self._open: dict[str, Tool] = {}
        self._ahead = None if self._box.ahead is None else Ahead(self._box.ahead.gains, self._opened)
        self._calls = self._errors = 0
        self._seconds = 0.0
        self._made: list[tuple[str, float, float]] = []

    @override
    def reset(self, row: Row) -> str:
        self._row = row
        return ""

    @override
    async def step(self, action: str) -> Step:
        calls = self._box.form.calls(action)
        results = await self._results(calls)
        return Step(self._box.form.results(results)) if calls else Step(done=True)

    @override
    async def refuse(self, action: str, why: str) -> Step:
        calls = [call for call in self._box.form.calls(action) if not call.error]
        return Step(self._box.form.results(await self._results([*calls, Call(error=why)])))

    async def run_ahead(self, event: Event) -> None:
        """Start, feed or make a call of the action that is being drawn."""
        assert self._ahead is not None
        match event:
            case Started(number, tool):
                self._ahead.start(number, tool)
            case ArgumentPart(number, name, text):
                self._ahead.feed(number, name, text)
            case Finished(number, source):
                (call,) = self._box.form.calls(source)
                arguments = self._checked(call)
                await self._ahead.finish(number, call.tool, arguments)
            case _:
                pass

    @override
    async def close(self) -> None:
        try:
            for tool in self._open.values():
                if inspect.isawaitable(closed := tool.close()):
                    await closed
        finally:
            if self._owned is not None:
                self._owned.close()

    @override
    def figures(self) -> Mapping[str, float]:
        partial = {} if self._ahead is None else self._ahead.figures()
        return {"tool_calls": self._calls, "tool_errors": self._errors, "tool_seconds": self._seconds, **partial}

    @override
    def calls_made(self) -> Sequence[tuple[str, float, float]]:
        return self._made

    async def _results(self, calls: Sequence[Call]) -> list[str]:
        """Make the calls of an action, and return the texts of their results."""
        began = time.monotonic()
        outcomes = [await self._outcome(number, call) for number, call in enumerate(calls)]
        if self._ahead is not None:
            self._ahead.end(began - self.asked)
        seconds = sum(outcome.seconds for outcome in outcomes)
        made = zip(calls, outcomes, strict=True)
        self._made += [(call.tool, outcome.began, outcome.ended) for call, outcome in made if outcome.ended]
        self._seconds += seconds
        if seconds > self.cfg.deadline_s:  # though some of them have passed before the action was whole
            raise TimeoutError(f"not done after {self.cfg.deadline_s:g} s")
        return [self._text(outcome) for outcome in outcomes]

    async def _outcome(self, number: int, call: Call) -> CallOutcome:
        try:
            arguments = self._checked(call)
        except Exception as error:
            return CallOutcome(error=error)
        if self._ahead is not None and (known := await self._ahead.take(number, call.tool, arguments)) is not None:
            return known
        return await outcome_of(lambda: self._opened(call.tool)[0].call(**arguments))

    def _checked(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call (ArgumentError: it cannot be made)."""
        if call.error:
            raise ArgumentError(call.error)
        if call.tool not in self._box.tools:
            raise ArgumentError(f"no tool {call.tool!r}{did_you_mean(call.tool, self._box.tools)}")
        cfg, _ = self._box.tools[call.tool]
        return checked_arguments(schema := cfg.schema(), _arguments(call, schema))

    def _opened(self, name: str) -> tuple[Tool, bool]:
        """Return what the episode calls, and whether all episodes share it."""
        _, tool = self._box.tools[name]
        if name not in self._open:
            self._open[name] = tool.open(self._row)
        return self._open[name], self._open[name] is tool

    def _text(self, outcome: CallOutcome) -> str:
        self._calls += 1
        text, error = outcome.value, outcome.error
        if error is not None:
            self._errors += 1
            text = f"error: {error}" if isinstance(error, ArgumentError) else f"error: {type(error).__name__}: {error}"
        text = text if isinstance(text, str) else _plain(text)
        return text if len(text) <= self._max_result else f"{text[: self._max_result]}..."


def _arguments(call: Call, schema: Mapping[str, Any]) -> Any:
    """Return the arguments of a call; a text is the only one, or a JSON object of several."""
    if call.arguments is not None:
        return call.arguments
    names = schema.get("properties", {})
    if len(names) == 1:
        (name, one), *_ = names.items()
        return {name: call.text if one.get("type") == "string" else json_or(call.text, call.text)}
    found = json_or(call.text, None) if call.text else {}
    if not isinstance(found, dict):
        raise ArgumentError(f"expected a JSON object of {', '.join(names)}")
    return found


def _plain(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
