"""Reader of an action while it is drawn: starts what its environment can run ahead, and finds what can only fail."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, override

from axlearn_like.config import ConfigBase
from mesh.errors import did_you_mean
from rl.environments.streaming.events import ArgumentPart, Event, Finished, Invalid, Started
from rl.environments.streaming.gains import Gains
from rl.environments.tools.tool import ArgumentChecker, Tool


class PartialExecution:
    """Rules for calls that are run while their action is drawn. Transcripts and rewards are those without."""

    class Config(ConfigBase["PartialExecution"]):
        """Fields."""

        abort_invalid: bool = False  # end an action at a call that can only fail. This alone changes transcripts.
        # One of so many calls of a tool that claims to be pure is made twice and compared; 0: none
        recheck_every: int = 50

        @override
        def check_fields(self) -> None:
            self.require_least(0, "recheck_every")


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """Knowledge of a reader about its environment."""

    events: Callable[[str], list[Event]]  # events of a text, of its call form
    tools: Mapping[str, Tool.Config]
    gains: Gains  # says which of them are run ahead
    cfg: PartialExecution.Config

    @property
    def idle(self) -> bool:
        """True if there is nothing to run ahead, and nothing to refuse."""
        return not self.cfg.abort_invalid and not any(self.eager(name) for name in self.tools)

    def eager(self, tool: str) -> bool:
        """Return True if calls of a tool are run ahead."""
        return tool in self.tools and self.tools[tool].pure and tool not in self.gains.off


class ActionReader:
    """Reader of one action; `tell` has each event that is to be acted on, in order."""

    def __init__(self, tools: Tools, tell: Callable[[Event], Any], row: Mapping[str, Any]):
        self._tools, self._tell, self._row = tools, tell, row
        self._text, self._first, self._number = "", 0, 0  # text behind the last complete call, its place, its number
        self._seen = 0  # events of that text
        self._called = dict[int, str]()  # call -> tool
        self._checkers = dict[tuple[int, str], ArgumentChecker | None]()

    def read(self, text: str) -> Invalid | None:
        """Read more text; returns the first place at which the action can only fail, in characters of all of it."""
        self._text += text
        events = self._tools.events(self._text)
        new, self._seen = events[self._seen :], len(events)
        done, following = 0, 0
        for event in new:
            event = event._replace(number=self._number + event.number, end=self._first + event.end)
            if self._tools.cfg.abort_invalid and (why := self._wrong(event)):
                return Invalid(event.number, why, event.end)
            self._act(event)
            if isinstance(event, Finished):
                done, following = event.end - self._first, event.number + 1
        if done:
            self._text, self._first, self._number = self._text[done:], self._first + done, following
            self._seen = len(self._tools.events(self._text))
        return None

    def _act(self, event: Event) -> None:
        if isinstance(event, Started):
            self._called[event.number] = event.tool
        if not isinstance(event, Invalid) and self._tools.eager(self._called.get(event.number, "")):
            self._tell(event)

    def _wrong(self, event: Event) -> str:
        """Return why a call can only fail; "" if it may succeed."""
        match event:
            case Invalid(why=why):
                return why
            case Started(tool=tool) if tool not in self._tools.tools:
                return f"no tool {tool!r}{did_you_mean(tool, self._tools.tools)}"
            case ArgumentPart(number, name, text):
                return self._wrong_part(number, name, text)
            case _:
                return ""

    def _wrong_part(self, number: int, name: str, text: str) -> str:
        cfg = self._tools.tools[self._called[number]]
        names = cfg.schema().get("properties", {})
        if name and names and name not in names:
            return f"unknown argument {name!r}{did_you_mean(name, names)}"
        name = name or (next(iter(names)) if len(names) == 1 else "")
        if (number, name) not in self._checkers:
            self._checkers[number, name] = cfg.checker(name, self._row)
        checker = self._checkers[number, name]
        return "" if checker is None else checker.feed(text)
