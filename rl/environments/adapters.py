"""Environments of other forms: plain classes, those of gymnasium, and those of the library verifiers.

They are taken by their methods: none of the libraries is imported, or needed for tests.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

from axlearn_like.config import REQUIRED
from mesh.errors import UserError
from rl.environments.environment import Environment, Row, Step

__all__ = ["GymEnvironment", "PlainEnvironment", "VerifiersEnvironment"]


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
        return _close(self._inner)


class GymEnvironment(Environment):
    """An environment of gymnasium (or of gym, with four values of a step), whose observations can be shown as text."""

    class Config(Environment.Config):
        make: Callable[..., Any] = REQUIRED  # a function that returns the environment, such as `gymnasium.make`
        arguments: dict[str, Any] = {}
        # Function from the text of an action to the environment's action; None: the text itself.
        read: Callable[[str], Any] | None = None
        show: Callable[[Any], str] | None = None  # function from an observation to text; None: `str`

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._read, self._show = cfg.read or str.strip, cfg.show or str
        self._inner = cfg.make(**cfg.arguments)

    @override
    def reset(self, row: Row) -> str:
        found = _called(self._inner.reset, seed=row["seed"], options={"row": dict(row)})
        pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
        return self._show(found[0] if pair else found)

    @override
    def step(self, action: str) -> Step:
        observation, reward, *ends, _ = self._inner.step(self._read(action))
        return Step(self._show(observation), reward, any(ends))

    @override
    def close(self) -> Any:
        return _close(self._inner)


class VerifiersEnvironment(Environment):
    """Environment of the library verifiers: `setup_state`, `is_completed` and `env_response`, and its rubric's reward.

    One object serves all episodes of a process, whose state is a mapping, as in that library. Its own rollouts and its
    client of a model are not used: the policy's turns are those of the engine.
    """

    class Config(Environment.Config):
        make: Callable[..., Any] = REQUIRED  # usually `load_environment` of an environment's module
        arguments: dict[str, Any] = {}

        @override
        def share(self) -> Any:
            made = self.make(**self.arguments)
            for name in ("is_completed", "env_response", "rubric"):
                if not hasattr(made, name):
                    kind = type(made).__name__
                    raise UserError(
                        f"{kind} has no {name}: expected an environment in the form of verifiers 0.1 and 0.2 "
                        "(SingleTurnEnv, MultiTurnEnv ...); a taskset of verifiers.v1 runs policies by itself"
                    )
            return made

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._inner = cfg.share() if shared is None else shared
        self._state: dict[str, Any] = {}

    @override
    async def reset(self, row: Row) -> str:
        prompt = row.get("prompt")
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            prompt = [{"role": "user", "content": row["question"]}]
        known = {
            "prompt": [_Message(message) for message in prompt],
            "answer": row["answer"],
            "info": row.get("info", {}),
            "input": dict(row),
        }
        kept: dict[str, Any] = {"completion": [], "responses": [], "trajectory": [], "metrics": {}, "timing": {}}
        self._state = {**known, **kept, "task": row["family"], "example_id": row["problem_id"], "turn": 0}
        await self._advance("setup_state")
        return ""

    @override
    async def step(self, action: str) -> Step:
        state, said = self._state, _Message(role="assistant", content=action)
        state["trajectory"].append({"prompt": self._messages(), "completion": [said], "response": None})
        state["completion"].append(said)
        state["turn"] += 1
        if await self._completed():
            return Step("", await self._reward(), True)
        answer = await self._advance("env_response")
        given = [_Message(role="user", content=answer)] if isinstance(answer, str) else list(answer or ())
        state["completion"] += given
        observation = "\n".join(str(_content(message)) for message in given)
        if await self._completed():
            return Step(observation, await self._reward(), True)
        return Step(observation)

    @override
    def figures(self) -> Mapping[str, float]:
        metrics = self._state.get("metrics") or {}
        return {str(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)}

    def _messages(self) -> list[Any]:
        return [*self._state["prompt"], *self._state["completion"]]

    async def _completed(self) -> bool:
        found = _called(self._inner.is_completed, messages=self._messages(), state=self._state)
        return bool(await _awaited(found))

    async def _advance(self, method: str) -> Any:
        """Call a method that may return a new state, alone or behind its result; returns the result."""
        if (call := getattr(self._inner, method, None)) is None:
            return None
        found = await _awaited(_called(call, messages=self._messages(), state=self._state))
        if isinstance(found, tuple):
            found, self._state = found
        elif isinstance(found, dict):
            found, self._state = None, found
        return found

    async def _reward(self) -> float:
        """Return the rubric's reward: of what it returns, or what it writes into the state."""
        state = self._state
        named = {name: state[name] for name in ("prompt", "completion", "answer", "task", "info", "example_id")}
        found = await _awaited(_called(self._inner.rubric.score_rollout, state=state, **named))
        if found is not None:
            reward = found["reward"] if isinstance(found, Mapping) else found.reward
            state["metrics"] = found.get("metrics") if isinstance(found, Mapping) else getattr(found, "metrics", {})
            return reward
        return state["reward"]


class _Message(dict[str, Any]):
    """A message to read as a mapping, as in earlier versions of the library, or by attributes, as in later ones."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _called(function: Callable[..., Any], **named: Any) -> Any:
    """Call a function with those of the arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        named = {one.name: named[one.name] for one in parameters if one.name in named}
    return function(**named)


def _content(message: Any) -> Any:
    return message["content"] if isinstance(message, Mapping) else message.content


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _close(inner: Any) -> Any:
    close = getattr(inner, "close", None)
    return close() if callable(close) else None
