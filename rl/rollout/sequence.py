"""A sequence: one completion of a request, with its tokens and their records, its pages and its program."""

import dataclasses
import time
from collections.abc import Callable, Generator, Hashable
from enum import Enum
from typing import Any

import numpy as np

from rl.roles.messages import FinishReason, Rollout
from rl.rollout.agent_loop import AgentLoop, Command, Generate, Join, Wait
from rl.rollout.request import OnTokens, Request, RequestOutput, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.stop_strings import StopText, check_strings


class State(Enum):
    """Scheduling state of a sequence."""

    WAITING = "waiting"  # for a row: it wants tokens drawn
    RUNNING = "running"  # has a row
    PARKED = "parked"  # its program waits for something else
    ENDED = "ended"


@dataclasses.dataclass(slots=True)
class SequenceGroup:
    """A request under way."""

    number: int
    request: Request
    sampler: Sampler.Config
    stop: StopConditions  # resolved: max_new is set
    due: float | None  # on the monotonic clock
    on_tokens: OnTokens | None
    sequences: list["Sequence"] = dataclasses.field(default_factory=list)
    begun: bool = False  # some of its tokens were computed
    error: str | None = None

    @property
    def ended(self) -> bool:
        return all(sequence.ended for sequence in self.sequences)

    def finished(self) -> RequestOutput:
        found = sorted((s for s in self.sequences if not s.is_prefix), key=lambda s: s.sample)
        return RequestOutput(self.number, tuple(sequence.rollout() for sequence in found), self.error)


class Sequence:
    """Tokens of prompt and completion, and how far their keys and values are in the pool.

    `cached` counts from the start; the last token is never in the pool before it is fed. A *prefix* holds a prompt that
    several samples will share, draws nothing and is no rollout.
    """

    def __init__(self, group: SequenceGroup, sample: int, tokens: list[int], agent_loop: AgentLoop | None):
        self.group, self.sample, self.tokens = group, sample, tokens
        self._agent_loop = agent_loop
        self._commands: Generator[Command, Any, None] | None = None  # the agent_loop, once it has begun
        self.state = State.WAITING
        self.pages: list[int] = []
        self.cached = 0
        self.cache_key: Hashable = None
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.actions: list[bool] = []
        self.reason: FinishReason = "stop"
        self.tags: set[str] = set()
        self.limit = len(tokens)  # tokens at which the step in hand ends
        self.text: StopText | None = None
        self.checked = 0  # completion tokens in which no stop string was found
        self.waits_for: Wait | Join | None = None  # while parked
        self.reported = 0  # completion tokens given to on_tokens

    # ---- what programs see

    @property
    def prompt(self) -> np.ndarray:
        return self.group.request.prompt.tokens

    @property
    def output_tokens(self) -> np.ndarray:
        return np.asarray(self.tokens[len(self.prompt) :], np.int32)

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    # ---- what the engine does

    @property
    def name(self) -> str:
        """As messages call it."""
        request = self.group.request.name
        return request if self.is_prefix else f"{request}, sample {self.sample}"

    @property
    def is_prefix(self) -> bool:
        return self._agent_loop is None

    @property
    def drawn(self) -> int:
        """Tokens of the completion so far, given ones included: the position of the next draw."""
        return len(self.tokens) - len(self.prompt)

    @property
    def most(self) -> int:
        """Tokens that the sequence can ever have."""
        assert self.group.stop.max_new is not None
        return len(self.prompt) + self.group.stop.max_new

    @property
    def unfilled(self) -> int:
        """Tokens to prefill before the next can be drawn."""
        return len(self.tokens) - 1 - self.cached

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: by priority, then by arrival, then by sample."""
        return (-self.group.request.priority, self.group.number, self.sample)

    def advance(self, answer: Any, failure: Exception | None) -> Command:
        """The program's next command. Raises StopIteration at its end, and whatever the program raises."""
        assert self._agent_loop is not None
        if self._commands is None:
            self._commands = self._agent_loop(self)
        return self._commands.send(answer) if failure is None else self._commands.throw(failure)

    def close(self) -> None:
        """End the program where it is. Raises what its own `finally` and the like raise."""
        if self._commands is not None:
            self._commands.close()

    def begin(self, command: Generate, decode: Callable[[Any], str] | None) -> None:
        """Take up a step that draws tokens.

        Raises:
            UserError: stop strings that cannot be looked for.
        """
        check_strings(command.strings, has_text=decode is not None, where=self.name)
        self.limit = self.most if command.max_new is None else min(self.most, len(self.tokens) + command.max_new)
        strings = (*self.group.stop.strings, *command.strings)
        self.text = StopText(strings, decode) if strings and decode is not None else None
        self.checked = self.drawn

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Tokens drawn by the policy. All but the last have been fed, so their keys and values are in the pool."""
        self.cached += len(tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        self.actions += [True] * len(tokens)

    def observe(self, tokens: list[int], version: int) -> int:
        """Tokens given to it, as many as there is room for; how many those are."""
        room = self.most - len(self.tokens)
        if len(tokens) > room:
            self.reason = "length"
        tokens = tokens[:room]
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [version] * len(tokens)
        self.actions += [False] * len(tokens)
        return len(tokens)

    def cut_at_stop_string(self) -> bool:
        """Whether a stop string was found; then nothing is left behind the token that completes it."""
        if self.text is None:
            return False
        kept = self.text.find(self.tokens[len(self.prompt) :], self.checked)
        self.checked = self.drawn
        if kept is None:
            return False
        for records in (self.logprobs, self.versions, self.actions):
            del records[kept:]
        del self.tokens[len(self.prompt) + kept :]
        self.cached = min(self.cached, len(self.tokens) - 1)
        return True

    def inherit(self, parent: "Sequence") -> None:
        """A fork has the parent's records."""
        self.logprobs, self.versions = list(parent.logprobs), list(parent.versions)
        self.actions, self.tags = list(parent.actions), set(parent.tags)
        self.cache_key = parent.cache_key

    def resume_from(self, rollout: Rollout) -> None:
        """Take over what a rollout has."""
        self.tokens += rollout.tokens.tolist()
        self.logprobs, self.versions = rollout.logprobs.tolist(), rollout.versions.tolist()
        self.actions, self.tags = rollout.action_mask.tolist(), set(rollout.tags)

    def report(self) -> None:
        """Tell on_tokens what it has not seen."""
        first, self.reported = self.reported, self.drawn
        if self.group.on_tokens is not None and first < self.drawn:
            self.group.on_tokens(self.sample, self.output_tokens[first:], np.asarray(self.logprobs[first:], np.float32))

    def rollout(self) -> Rollout:
        return Rollout(
            prompt_id=self.group.request.prompt.id,
            sample_id=self.sample,
            tokens=self.output_tokens,
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            action_mask=np.asarray(self.actions, bool),
            finish_reason=self.reason,
            tags=tuple(sorted(self.tags)),
        )


def overdue(group: SequenceGroup) -> bool:
    return group.due is not None and time.monotonic() >= group.due
