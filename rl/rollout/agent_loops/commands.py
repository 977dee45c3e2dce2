"""Agent loops: what a sample does, as a generator of commands that the engine carries out.

    def with_calculator(completion):
        while (yield Generate(strings=("</call>",))) == "stop" and (call := find_call(completion.output_tokens)):
            result = yield Wait(pool.submit(evaluate, call))  # frees its row; keeps its pages while there is room
            yield Observe(encode_inside(tokenizer, result))    # tokens that are given, not drawn

A command that cannot be carried out raises `mesh.UserError` in the loop; an exception that a loop does not catch fails
its request. A completion is deterministic if its loop is: its draws depend on the request, the sample id and the
position alone.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from axlearn_like.input.shuffle import derived_seed
from rl.protocol.messages import FinishReason, Rollout
from rl.protocol.segments import TokenSegment

_SPAWNED = 1 << 31  # ids of spawned samples begin here: a request's own are small


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End of a draw that its watch asks for."""

    kept: int  # tokens of this draw that stay, 1 or more; later ones are dropped, whenever they were drawn
    reason: str  # answer of the `Generate`, such as "invalid_call"


class DrawWatch(Protocol):
    """Reader of a draw while it goes on. It belongs to one `Generate` of one sample."""

    def feed(self, tokens: Sequence[int]) -> Abort | None:
        """Read the tokens of a dispatch, in a thread of its own, while the device draws the next ones.

        How a draw is cut into dispatches is chance: an `Abort` must follow from the tokens alone, with the same `kept`
        however they were cut. A watch that raises, or takes longer than a second, is counted and not asked again.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """Draw tokens until a stop condition; answers with the finish reason: "stop", "length", or that of an `Abort`.

    Once the request's `max_new_tokens` is used up it answers "length" at once, every time.
    """

    max_new_tokens: int | None = None  # limit of this command's tokens; None: what the request still allows
    strings: tuple[str, ...] = ()  # stop strings of this command alone, beside the request's
    watch: DrawWatch | None = None  # reads the tokens as they are drawn, and may end the draw


@dataclasses.dataclass(frozen=True, slots=True)
class Observe:
    """Append tokens that were not drawn, such as a tool's answer.

    They count against the request's `max_new_tokens`; those for which there is no room are left out. Answers with the
    number of tokens appended.
    """

    tokens: Sequence[int]
    # Segments of these tokens, if they are the rest of a prompt, for an engine with `kvcomm`
    segments: tuple[TokenSegment, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Give up the row until the future is done; answers with its result, or raises its exception in the loop."""

    future: Future[Any]
    # Seconds after which TimeoutError is raised in the loop, even if the future never ends; None: there is none
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """Copy all tokens so far into new completions, each continued by `agent_loop`; answers with the completions."""

    agent_loop: "AgentLoop"
    samples: tuple[int, ...]  # sample ids of the copies, new in the request: they make the keys of their draws


@dataclasses.dataclass(frozen=True, slots=True)
class Spawn:
    """Start a completion of a prompt of its own, continued by `agent_loop`; answers with the completion.

    Its sample id, and with it the key of each of its draws, follows from this one's and from how many it has spawned
    before. What its prompt has in common with tokens that are in the cache, such as this completion's, is not computed
    again. It is no rollout of the request, ends at the latest with this completion, and if its loop fails, a `Join`
    of it raises the error.
    """

    prompt: Sequence[int]  # tokens, at most the engine's `max_prompt_tokens`
    agent_loop: "AgentLoop"
    max_new_tokens: int | None = None  # limit of its tokens; None: the request's
    # Policy that draws it, of the request's `policies`, or "base": the model without an adapter. None: this one's own.
    policy: str | None = None
    segments: tuple[TokenSegment, ...] = ()  # segments of the prompt, in order; (): it is one text


def child_sample(parent: int, index: int) -> int:
    """Return the sample id of the completion that a sample spawns as its number `index`: 2**31 to 2**32 - 1."""
    return _SPAWNED + derived_seed("spawn", parent, index) % _SPAWNED


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Wait for these completions; answers with their rollouts in this order."""

    completions: tuple["Completion", ...]
    # Tokens of each that are known: it is enough that one completion has more, or has ended, and its rollout so far
    # comes with finish reason "abort" if it has not. None: all must have ended.
    after: tuple[int, ...] | None = None


Command = Generate | Observe | Wait | Fork | Spawn | Join


class Completion(Protocol):
    """The sequence that an agent loop steers, as the loop sees it."""

    @property
    def sample(self) -> int:
        """The sample id, unique in the request."""
        ...

    @property
    def prompt(self) -> np.ndarray:
        """int32, as requested."""
        ...

    @property
    def output_tokens(self) -> np.ndarray:
        """int32, everything after the prompt."""
        ...

    @property
    def ended(self) -> bool:
        """True once its loop has ended."""
        ...

    def rollout(self) -> Rollout:
        """Return its tokens and their records so far."""
        ...

    def trace(self, spans: Sequence[tuple[str, float, float]]) -> None:
        """Take the name, beginning and end of each call of its tools, on the monotonic clock, for its timeline."""
        ...


# A loop may return the finish reason of its completion; None: that of its last Generate.
AgentLoop = Callable[[Completion], Generator[Command, Any, FinishReason | None]]


def single_turn(completion: Completion) -> Generator[Command, Any, None]:
    """Generate once."""
    yield Generate()
