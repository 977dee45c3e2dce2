"""Environments for tests, which a policy of random weights can act in, and problems for them."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any, override

from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.environments.environment import Environment, Step
from rl.environments.task import EnvironmentTask
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows

TOKENIZER = ByteTokenizer.Config().build()

closed: list[int] = []  # problems whose environments were closed


class Echo(Environment):
    """Environment that tells the length of each action, pays half a point for it, and is over after some."""

    class Config(Environment.Config):
        turns: int = 3
        max_turn_tokens: int | None = 4
        pure: bool = True

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._left, self._problem = cfg.turns, -1

    @override
    def reset(self, row: Any) -> str:
        self._problem = row["problem_id"]
        return f"{row['question']}!"

    @override
    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(0)
        self._left -= 1
        return f"<{len(action)}>", 0.5, self._left == 0

    @override
    def close(self) -> None:
        closed.append(self._problem)


class Broken(Echo):
    """Environment that goes wrong at its second action, in one of many ways."""

    class Config(Echo.Config):
        how: str = "raises"
        deadline_s: float = 0.1

    released = threading.Event()  # lets calls return that hang

    @override
    def reset(self, row: Any) -> str:
        if self.cfg.how == "reset":  # pyright: ignore[reportAttributeAccessIssue]
            raise OSError("no such world")
        return super().reset(row)

    @override
    async def step(self, action: str) -> Any:
        found = await super().step(action)
        if self._left > 1:
            return found
        match self.cfg.how:  # pyright: ignore[reportAttributeAccessIssue]
            case "raises":
                raise KeyError("lost")
            case "exits":
                raise SystemExit(3)
            case "hangs":
                await asyncio.sleep(3600)
            case "blocks":
                Broken.released.wait(3600)
            case "nan":
                return "", float("nan"), False
            case "text":
                return "", "1.0", False
            case "pair":
                return "", 1.0
            case "bytes":
                return b"seen", 1.0, False
            case _:
                return found


class Slow(Echo):
    """Environment that takes its time."""

    class Config(Echo.Config):
        seconds: float = 0.02

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._seconds = cfg.seconds

    @override
    async def step(self, action: str) -> Any:
        time.sleep(self._seconds)
        return await super().step(action)


class Typed(Slow):
    """Environment that pays for ASCII: a reward that differs, and can be raised."""

    @override
    async def step(self, action: str) -> Any:
        observation, _, done = await super().step(action)
        return observation, sum(character.isascii() for character in action) / 4, done


class Forever(Echo):
    """Environment that never ends."""

    @override
    async def step(self, action: str) -> Step:
        del action
        return Step("more", 0.25)


def rows() -> Iterator[dict[str, Any]]:
    """Yield rows with short questions."""
    yield from ({"prompt": f"q{n}", "answer": str(n)} for n in range(40))


def tasks(environment: Environment.Config) -> TaskMixture.Config:
    """Return the rows as a task with an environment."""
    source = TaskRows.Config(rows=RowFunction.Config(function=rows), shuffle=False, label="toys")
    return TaskMixture.Config(families=(EnvironmentTask.Config(source=source, environment=environment),))
