"""A sequence: one completion of a request, with its tokens and their records, its pages and its agent loop.

Nothing outside this file writes an attribute of a sequence: the scheduler, the KV-cache manager, the request lifecycle
and the engine call its methods.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from collections.abc import Sequence as Items
from enum import Enum
from typing import Any

import numpy as np

from rl.protocol.messages import WHOLE, FinishReason, Rollout
from rl.protocol.segments import TokenSegment
from rl.rollout.agent_loops.commands import AgentLoop, Command, Generate, Join, Wait
from rl.rollout.decoding.constraints import Constraints
from rl.rollout.decoding.records import CompletionRecords, RoutingRecord
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.decoding.watched import WatchedDraw
from rl.rollout.model_runner.adapter_slots import LoadedAdapter
from rl.rollout.request import OnTokens, Request, RequestOutput, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.scheduling.timeline import Lane, Span, Timeline


class State(Enum):
    """Scheduling state of a sequence."""

    WAITING = "waiting"  # waits for a row of the batch: has tokens to draw
    RUNNING = "running"  # has a row
    SUSPENDED = "suspended"  # agent loop waits for a future or for other completions
    ENDED = "ended"


@dataclasses.dataclass(slots=True)
class SequenceGroup:
    """An unfinished request with all its sequences."""

    number: int
    request: Request
    sampler: Sampler.Config
    stop: StopConditions  # resolved: max_new_tokens is set
    due: float | None  # time on the monotonic clock
    on_tokens: OnTokens | None
    adapter: LoadedAdapter | None = None  # None: the base model
    sequences: list["Sequence"] = dataclasses.field(default_factory=list)
    started: bool = False  # some of its tokens were computed
    error: str | None = None
    prompt_scores: TokenScores | None = None  # scores until now
    parent: "Sequence | None" = None  # the sequence that has spawned it
    # Adapters of the request's `policies`; None: the base
    policies: Mapping[str, LoadedAdapter | None] = dataclasses.field(default_factory=dict[str, LoadedAdapter | None])

    @property
    def root(self) -> "SequenceGroup":
        """The request that it comes of by spawning: itself for what was submitted."""
        return self if self.parent is None else self.parent.group.root

    @property
    def depth(self) -> int:
        """Number of sequences above it that have spawned it."""
        return 0 if self.parent is None else 1 + self.parent.group.depth

    @property
    def slot(self) -> int:
        """The place of its adapter in the bank; 0: the base model."""
        return 0 if self.adapter is None else self.adapter.slot

    def version(self, base: int) -> int:
        """Return the version of what draws its tokens: its adapter's, or else that of the base."""
        return base if self.adapter is None else self.adapter.version

    @property
    def unfinished(self) -> int:
        """Sequences that have not ended, those that come of a shared prefix among them."""
        return sum(self.request.samples if one.is_prefix else 1 for one in self.sequences if not one.ended)

    @property
    def ended(self) -> bool:
        """True when all sequences have ended."""
        return all(sequence.ended for sequence in self.sequences)

    @property
    def overdue(self) -> bool:
        """True when its deadline has passed."""
        return self.due is not None and time.monotonic() >= self.due

    def output(self) -> RequestOutput:
        """Return the rollouts in order of sample id."""
        found = sorted((s for s in self.sequences if not s.is_prefix), key=lambda s: s.sample)
        rollouts, scores = tuple(one.rollout() for one in found), tuple(one.records.scores for one in found)
        spawned = tuple((one.prompt, one.rollout()) for parent in found for one in parent.descendants())
        lanes = tuple(found[0].lanes(f"sample {found[0].sample}")) if found else ()
        return RequestOutput(self.number, rollouts, self.error, scores, self.prompt_scores, spawned, lanes)


class Sequence:
    """Tokens of prompt and completion, and how many of them have keys and values in the pool.

    `cached` counts from the start; the last token is never in the pool before it is fed. A *shared prefix* holds a
    prompt for several samples, draws nothing and is no rollout.
    """

    def __init__(self, group: SequenceGroup, sample: int, tokens: list[int], agent_loop: AgentLoop | None):
        """Join a request; `agent_loop` is None for a shared prefix."""
        self.group, self.sample, self.tokens = group, sample, tokens
        self._agent_loop = agent_loop
        # The agent loop, once it has started.
        self._commands: Generator[Command, Any, FinishReason | None] | None = None
        self.state = State.WAITING
        self.pages: list[int] = []
        self.cached = 0
        self.cache_key: Hashable = None  # dependency of keys and values beside the tokens; None: a mixture
        self.records = CompletionRecords()
        self.reason: FinishReason = "stop"
        self.tags: set[str] = set()
        self.routing = RoutingRecord()
        self.limit = len(tokens)  # tokens at which the current command ends
        self.waits_for: Wait | Join | None = None  # awaited command of a suspended sequence
        self._wait_ends = math.inf  # time on the monotonic clock
        self.constraints = Constraints(group.request, group.stop)
        self._reported = 0  # completion tokens given to on_tokens
        self.watched: WatchedDraw | None = None  # state of the current command's watch
        self.children: list[SequenceGroup] = []  # spawned by it, in order
        self._timeline = Timeline()
        self.segments = group.request.segments  # segments of its first tokens; (): one text
        group.sequences.append(self)

    # ---- the view of an agent loop

    @property
    def prompt(self) -> np.ndarray:
        """int32, as requested."""
        return self.group.request.prompt.tokens

    @property
    def output_tokens(self) -> np.ndarray:
        """int32, everything after the prompt."""
        return np.asarray(self.tokens[len(self.prompt) :], np.int32)

    @property
    def ended(self) -> bool:
        """True once its agent loop has ended."""
        return self.state is State.ENDED

    def trace(self, spans: Items[tuple[str, float, float]]) -> None:
        """Take the name, beginning and end of each call of its tools, on the monotonic clock."""
        self._timeline.tools += [Span(*one) for one in spans]

    # ---- the view of the engine

    @property
    def waited_too_long(self) -> bool:
        """True if it waits for a future, and the seconds that it would wait have passed."""
        return time.monotonic() >= self._wait_ends

    @property
    def name(self) -> str:
        """The sequence's name in messages."""
        request = self.group.request.name
        return request if self.is_prefix else f"{request}, sample {self.sample}"

    @property
    def is_prefix(self) -> bool:
        """True for a shared prefix."""
        return self._agent_loop is None

    @property
    def drawn(self) -> int:
        """Tokens of the completion so far, given ones included: the position of the next draw."""
        return len(self.tokens) - len(self.prompt)

    @property
    def settled(self) -> int:
        """Tokens of the completion that no watch can drop any more."""
        return self.drawn if self.watched is None else self.watched.seen

    @property
    def most(self) -> int:
        """Tokens that the sequence can ever have."""
        assert self.group.stop.max_new_tokens is not None
        return len(self.prompt) + self.group.stop.max_new_tokens

    @property
    def remaining(self) -> int:
        """Tokens that the current command may still draw."""
        return self.limit - len(self.tokens)

    @property
    def to_score(self) -> bool:
        """True for a shared prefix whose tokens are scored when they are prefilled."""
        scores = self.group.prompt_scores
        known = 0 if scores is None else len(scores)
        return self.is_prefix and self.group.request.prompt_scores and known < len(self.tokens) - 1

    @property
    def unfilled(self) -> int:
        """Tokens to prefill before it can draw: all but the last, which is fed."""
        return len(self.tokens) - 1 - self.cached

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The sort key of queues: smaller goes first. What was spawned goes with its request."""
        group = self.group
        number = 0 if group.parent is None else -group.number
        return (-group.request.priority, group.root.number, number, self.sample)

    def descendants(self) -> Iterator["Sequence"]:
        """Yield the sequences that it has spawned, each followed by its own."""
        for group in self.children:
            for one in group.sequences:
                yield one
                yield from one.descendants()

    # ---- states

    def wait(self) -> None:
        """Wait for a row."""
        self.state = State.WAITING
        self._timeline.enter("queue")

    def run(self) -> None:
        """Take a row."""
        self.state, self.group.started = State.RUNNING, True
        self._timeline.enter("draw")

    def suspend(self, waits_for: Wait | Join) -> None:
        """Wait for something else than a row."""
        self.state, self.waits_for = State.SUSPENDED, waits_for
        self._timeline.enter("join" if isinstance(waits_for, Join) else "wait")
        seconds = waits_for.seconds if isinstance(waits_for, Wait) else None
        self._wait_ends = math.inf if seconds is None else time.monotonic() + seconds

    def end(self, reason: FinishReason | None = None) -> None:
        """End, with this finish reason or the last one."""
        self.state, self.reason = State.ENDED, reason or self.reason
        self._timeline.enter("")

    # ---- the agent loop

    def advance(self, answer: Any, failure: Exception | None) -> Command:
        """Return the loop's next command. Raises StopIteration at its end, and what the loop raises."""
        assert self._agent_loop is not None
        if self._commands is None:
            self._commands = self._agent_loop(self)
        return self._commands.send(answer) if failure is None else self._commands.throw(failure)

    def close(self) -> None:
        """Stop the loop where it is. Raises what its own `finally` blocks raise."""
        if self._commands is not None:
            self._commands.close()

    def generate(self, command: Generate, decode: Callable[[Any], str] | None) -> bool:
        """Start a command; returns False without room for a token (UserError: stop strings not searchable)."""
        self.constraints.search(command.strings, decode, self.drawn, self.name)
        self.limit = (
            self.most if command.max_new_tokens is None else min(self.most, len(self.tokens) + command.max_new_tokens)
        )
        if self.remaining <= 0:
            self.reason = "length"
        elif command.watch is not None:
            self.watched = WatchedDraw(command.watch, self.drawn)
        return self.remaining > 0

    def stop(self, reason: FinishReason) -> None:
        """End the current command."""
        self.reason, self.watched = reason, None

    # ---- tokens

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        version: int,
        tags: tuple[str, ...],
        routing: np.ndarray | None = None,
        kept: np.ndarray | None = None,
        scores: TokenScores | None = None,
    ) -> None:
        """Append drawn tokens. All but the last have been fed, so their keys and values are in the pool.

        `routing`: of the tokens that were fed, as many. `kept`: the tokens that each was drawn from. `scores`: theirs.
        """
        if routing is not None:
            self.routing.write(self.cached, routing)
        self.cached += len(tokens)
        self.tokens += tokens
        self.records.drawn(logprobs, version, kept, scores)
        self.tags.update(tags)

    def observe(self, tokens: list[int], version: int, segments: Items[TokenSegment] = ()) -> int:
        """Append given tokens, as many as there is room for; returns their number. `segments`: theirs, if any."""
        if segments and not self.segments:
            self.segments = (TokenSegment(len(self.tokens), "prompt"), *segments)
        room = self.most - len(self.tokens)
        if len(tokens) > room:
            self.reason = "length"
        tokens = tokens[:room]
        self.tokens += tokens
        self.records.given(len(tokens), version)
        return len(tokens)

    def cut_at_stop_string(self) -> bool:
        """Drop everything behind the token that completes a stop string; returns False if there is none."""
        kept = self.constraints.find_stop(self.tokens[len(self.prompt) :])
        if kept is None:
            return False
        self.cut(kept)
        return True

    def cut(self, kept: int) -> None:
        """Drop all but the first tokens of the completion."""
        self.records.cut(kept)
        del self.tokens[len(self.prompt) + kept :]
        self.cached = min(self.cached, len(self.tokens) - 1)

    def unwatched(self) -> list[int]:
        """Return the tokens that the watch of the current command has not been given, which it is given now."""
        if self.watched is None:
            return []
        return self.tokens[len(self.prompt) + self.watched.take(self.drawn) :]

    def inherit(self, parent: "Sequence") -> None:
        """Copy the parent's records: a fork."""
        self.records, self.tags = parent.records.copy(), set(parent.tags)
        self.cache_key, self.routing = parent.cache_key, parent.routing.copy()

    def continue_from(self, rollout: Rollout) -> bool:
        """Take over the tokens and records of a rollout; returns True if it had ended by itself."""
        self.tokens += rollout.tokens.tolist()
        self.records, self.tags = CompletionRecords.of(rollout), set(rollout.tags)
        self.routing = RoutingRecord(rollout.routing).copy()
        if rollout.finish_reason not in WHOLE:
            return False
        self.reason = rollout.finish_reason
        return True

    # ---- keys and values

    def start_cache(self, key: Hashable) -> None:
        """Begin without pages, under these weights."""
        self.cache_key = key

    def adopt(self, pages: list[int], cached: int, routing: Items[np.ndarray] = ()) -> None:
        """Take pages that hold its first `cached` tokens, and what was recorded of these."""
        self.pages, self.cached = pages, cached
        self.routing.adopt(routing)

    def add_pages(self, pages: list[int]) -> None:
        """Take pages for tokens to come."""
        self.pages += pages

    def replace_page(self, index: int, page: int) -> int:
        """Take a copy of a page in its place; returns the old one."""
        old, self.pages[index] = self.pages[index], page
        return old

    def drop_pages(self) -> list[int]:
        """Give up all pages, and keep the tokens; returns the pages."""
        pages, self.pages, self.cached = self.pages, [], 0
        return pages

    def drop_pages_behind(self, count: int) -> list[int]:
        """Give up all but the first pages, which hold its tokens; returns them."""
        pages, self.pages = self.pages[count:], self.pages[:count]
        return pages

    def prefilled(self, count: int, routing: np.ndarray | None = None, scores: TokenScores | None = None) -> None:
        """Count tokens whose keys and values have been written; record their routing, and scores of those behind."""
        known = self.group.prompt_scores
        if scores is not None:  # some are computed again after a preemption
            self.group.prompt_scores = scores if known is None else known[: self.cached] + scores
        if routing is not None:
            self.routing.write(self.cached, routing)
        self.cached += count
        self.group.started = True

    def approximated(self, count: int, tag: str) -> None:
        """Count tokens whose keys and values are approximations, of use to no other sequence."""
        self.cached += count
        self.cache_key = None
        self.tags.add(tag)
        self.group.started = True

    def mix_cache(self) -> None:
        """Record that new weights will draw over keys and values of old ones."""
        self.cache_key = None
        self.tags.add("mixed-cache")

    def spoil_cache(self) -> None:
        """Record that its keys and values are of no use to other sequences."""
        self.cache_key = None

    # ---- results

    def report(self) -> None:
        """Pass tokens to on_tokens that it has not seen."""
        new = slice(self._reported, self.settled)
        self._reported = new.stop
        if self.group.on_tokens is not None and new.start < new.stop:
            logprobs, scores = np.asarray(self.records.logprobs[new], np.float32), self.records.scores
            scores = None if scores is None else scores[new]
            self.group.on_tokens(self.sample, self.output_tokens[new], logprobs, scores)

    def spawned(self, group: SequenceGroup) -> None:
        """Take a request that it has spawned."""
        self.children.append(group)

    def lanes(self, name: str) -> Iterator[Lane]:
        """Yield its own timeline, under this name, and below it those of what it has spawned."""
        yield from self._timeline.lanes(name)
        above = f"{name}." if name.startswith("child") else "child "
        for number, group in enumerate(self.children, 1):
            for one in group.sequences:
                yield from one.lanes(f"{above}{number}")

    def rollout(self) -> Rollout:
        """Return its tokens and their records so far."""
        return Rollout(
            prompt_id=self.group.request.prompt.id,
            sample_id=self.sample,
            tokens=self.output_tokens,
            **self.records.fields(),
            finish_reason=self.reason,
            tags=tuple(sorted(self.tags)),
            routing=self.routing.first(len(self.tokens) - 1),
        )
