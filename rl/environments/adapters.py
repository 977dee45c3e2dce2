"""Environments of other forms: plain classes, and those of gymnasium, which are taken by their methods."""

import inspect
from collections.abc import Callable
from typing import Any, override

from axlearn_like.config import REQUIRED
from rl.environments.environment import Environment, Row, Step


class PlainEnvironment(Environment):
    """A class of the user's with `reset(row)` and `step(action)`, plain or async, and `close()` if it has one."""

    class Config(Environment.Config):
        make: Callable[..., Any] = REQUIRED  # the class, or a function that returns an object of one
        arguments: dict[str, Any] = {}

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._inner = cfg.make(**cfg.arguments)

    @override
    def reset(self, row: Row) -> Any:
        return self._inner.reset(row)

    @override
    def step(self, action: str) -> Any:
        return self._inner.step(action)

    @override
    def close(self) -> Any:
        close = getattr(self._inner, "close", None)
        return close() if callable(close) else None


class GymEnvironment(PlainEnvironment):
    """An environment of gymnasium (or of gym, with four values of a step), whose observations can be shown as text."""

    class Config(PlainEnvironment.Config):
        make: Callable[..., Any] = REQUIRED  # a function that returns the environment, such as `gymnasium.make`
        # Function from the text of an action to the environment's action; None: the text itself.
        read: Callable[[str], Any] | None = None
        show: Callable[[Any], str] | None = None  # function from an observation to text; None: `str`

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._read, self._show = cfg.read or str.strip, cfg.show or str

    @override
    def reset(self, row: Row) -> str:
        named: dict[str, Any] = {"seed": row["seed"], "options": {"row": dict(row)}}
        takes = inspect.signature(self._inner.reset).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in takes):
            named = {one.name: named[one.name] for one in takes if one.name in named}
        found = self._inner.reset(**named)
        pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
        return self._show(found[0] if pair else found)

    @override
    def step(self, action: str) -> Step:
        observation, reward, *ends, _ = self._inner.step(self._read(action))
        return Step(self._show(observation), reward, any(ends))
