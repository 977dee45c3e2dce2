"""Request programs: what a sample does, as a generator of steps that the engine carries out.

    def with_calculator(completion):
        while (yield Generate(strings=("</call>",))) == "stop" and (call := find_call(completion.output_tokens)):
            result = yield Wait(pool.submit(evaluate, call))  # gives up its row; its pages stay while there is room
            yield Observe(tokenizer.encode(result))           # tokens that are given, not drawn

A step that cannot be taken raises `mesh.UserError` in the program; what a program does not catch fails its request. A
completion is deterministic if its program is: its draws depend on the request, the sample id and the position alone.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rl.roles.messages import Rollout


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """Draw tokens until a stop rule; answers with the finish reason ("stop" or "length").

    Once the request's `max_new` is used up it answers "length" at once, every time.

    Attributes:
        max_new: at most so many tokens in this step; None: what the request still allows.
        strings: stop strings of this step alone, beside the request's.
    """

    max_new: int | None = None
    strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Observe:
    """Append tokens that were not drawn, such as a tool's answer.

    They count against the request's `max_new`; those for which there is no room are left out. Answers with the number
    of tokens appended.
    """

    tokens: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Give up the row until the future is done; answers with its result, or raises its exception in the program."""

    future: Future[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """Fork copies of all tokens so far, each continued by `agent_loop`; answers with the completions.

    Attributes:
        samples: the completions' sample ids, new in the request: they make the keys of their draws.
    """

    agent_loop: "AgentLoop"
    samples: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Wait until these completions have ended; answers with their rollouts in this order."""

    completions: tuple["Completion", ...]


Command = Generate | Observe | Wait | Fork | Join


class Completion(Protocol):
    """What a program sees of the sequence it steers."""

    @property
    def sample(self) -> int: ...
    @property
    def prompt(self) -> np.ndarray:
        """int32, as it was asked."""
        ...

    @property
    def output_tokens(self) -> np.ndarray:
        """int32, everything after the prompt."""
        ...

    @property
    def ended(self) -> bool: ...
    def rollout(self) -> Rollout: ...


AgentLoop = Callable[[Completion], Generator[Command, Any, None]]


def single_turn(completion: Completion) -> Generator[Command, Any, None]:
    """One completion."""
    del completion
    yield Generate()
