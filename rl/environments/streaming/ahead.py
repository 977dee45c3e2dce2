"""Execution of calls while their action is drawn, in the thread of their episode.

A result is used only if the finished action has the very call that was run; else it is dropped, and the call made as
ever. So observations and rewards are those of tools that wait for the action.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rl.environments.streaming.gains import Gains
from rl.environments.tools.tool import Diverged, PartialCall, Tool


class CallOutcome(NamedTuple):
    """Result of a call, or the error that it raised, the seconds that it took, and when it began and ended."""

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    def same(self, other: "CallOutcome") -> bool:
        """Return True if the policy sees the same."""
        return (repr(self.value), repr(self.error)) == (repr(other.value), repr(other.error))


async def outcome_of(call: Callable[[], Any]) -> CallOutcome:
    """Make a call, and return how it went."""
    began = time.monotonic()
    try:
        result = call()
        value = await result if inspect.isawaitable(result) else result
    except Exception as error:
        return CallOutcome(None, error, (ended := time.monotonic()) - began, began, ended)
    return CallOutcome(value, None, (ended := time.monotonic()) - began, began, ended)


@dataclasses.dataclass(slots=True)
class _Call:
    tool: str
    partial: PartialCall | None = None
    arguments: Mapping[str, Any] | None = None
    outcome: CallOutcome | None = None  # once its arguments are known
    seconds: float = 0.0  # running time of its parts
    began: float = 0.0  # time of the first part


class Ahead:
    """Running calls of one action; `open` gives the object that an episode calls, and whether all episodes share it."""

    def __init__(self, gains: Gains, open: Callable[[str], tuple[Tool, bool]]):
        self._gains, self._open = gains, open
        self._calls = dict[int, _Call]()
        self._spent, self._used = dict[str, float](), dict[str, float]()  # seconds by tool, of this turn
        self._saved_seconds = 0.0
        self._counts = Counter[str]()
        self._checks: list[threading.Thread] = []  # calls of shared tools that are made again

    def figures(self) -> dict[str, float]:
        """Return counts and seconds of the episode, once the calls that are made again have ended."""
        for check in self._checks:
            check.join()
        counts = {f"partial_{name}": self._counts[name] for name in ("calls", "discarded", "impure")}
        off = {f"partial_off_{tool}": 1.0 for tool in self._gains.off}
        return {**counts, "partial_saved_seconds": self._saved_seconds, **off}

    def start(self, number: int, tool: str) -> None:
        """Open a tool, and begin a call of it, before its arguments are known."""
        call = self._calls[number] = _Call(tool)
        begun = any(one.partial is not None for one in self._calls.values())
        with contextlib.suppress(Exception):  # the call itself will raise it
            opened, shared = self._open(tool)
            if not shared and not begun:  # one call at a time may change what the episode holds
                call.partial = opened.begin()

    def feed(self, number: int, name: str, text: str) -> None:
        """Run what is known of a call."""
        call = self._calls.get(number)
        if call is None or call.partial is None:
            return
        began = time.monotonic()
        try:
            call.partial.feed(name, text)
        except Exception:
            self._discard(call)
        call.seconds += time.monotonic() - began
        call.began = call.began or began

    async def finish(self, number: int, tool: str, arguments: Mapping[str, Any]) -> None:
        """Make a call that is complete, if what it changes can be undone."""
        call = self._calls.get(number)
        if call is None or call.tool != tool:
            return
        opened, shared = self._open(tool)
        if not shared and call.partial is None:
            return
        run = opened.call if call.partial is None else call.partial.finish
        outcome = await outcome_of(lambda: run(**arguments))
        outcome = outcome._replace(seconds=outcome.seconds + call.seconds, began=call.began or outcome.began)
        self._spent[tool] = self._spent.get(tool, 0.0) + outcome.seconds
        if isinstance(outcome.error, Diverged):
            self._discard(call)
        else:
            call.arguments, call.outcome = arguments, outcome

    async def take(self, number: int, tool: str, arguments: Mapping[str, Any]) -> CallOutcome | None:
        """Return the outcome of this call of the finished action; None: it has to be made."""
        call = self._calls.pop(number, None)
        if call is None or call.outcome is None or call.tool != tool or call.arguments != arguments:
            if call is not None:
                self._discard(call)
            for other in self._calls.values():  # begun on what this call is about to change
                if other.tool == tool and other.partial is not None:
                    self._discard(other)
            return None
        outcome, recheck = call.outcome, self._gains.to_recheck(tool)
        self._counts["calls"] += 1
        self._used[tool] = self._used.get(tool, 0.0) + outcome.seconds
        if call.partial is not None and not recheck:
            call.partial.commit()
        elif call.partial is not None:
            call.partial.discard()
            return await self._again(tool, arguments, outcome)
        elif recheck:  # nobody waits for it
            check = threading.Thread(target=lambda: asyncio.run(self._again(tool, arguments, outcome)), daemon=True)
            check.start()
            self._checks.append(check)
        return outcome

    async def _again(self, tool: str, arguments: Mapping[str, Any], outcome: CallOutcome) -> CallOutcome:
        """Make a call again, and compare."""
        opened, _ = self._open(tool)
        again = await outcome_of(lambda: opened.call(**arguments))
        if not outcome.same(again):
            self._counts["impure"] += 1
            self._gains.found_impure(tool)
        return again

    def drop(self) -> None:
        """Drop the calls that the finished action does not have, before it is carried out."""
        for call in self._calls.values():
            self._discard(call)
        self._calls.clear()

    def end(self, waited: float) -> None:
        """End the turn; `waited`: seconds that the finished action waited for calls that were run ahead."""
        self.drop()
        spent = sum(self._spent.values())
        for tool, seconds in self._spent.items():
            saved = self._used.get(tool, 0.0) - waited * seconds / (spent or 1.0)
            self._gains.turn(tool, saved)
            self._saved_seconds += saved
        self._spent, self._used = {}, {}

    def _discard(self, call: _Call) -> None:
        self._counts["discarded"] += 1
        if call.partial is not None:
            with contextlib.suppress(Exception):  # session is lost with it, and begins again
                call.partial.discard()
        call.partial = call.outcome = None
