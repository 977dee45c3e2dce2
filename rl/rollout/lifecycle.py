"""Requests under way: their programs carried from command to command, and how each of them ends.

Whatever a request's own code does (an agent loop, a callback, a tool's future), it is that request which fails.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from mesh import UserError
from rl.roles.messages import FinishReason
from rl.rollout.agent_loop import AgentLoop, Command, Fork, Generate, Join, Observe, Wait, single_turn
from rl.rollout.request import RequestOutput
from rl.rollout.scheduler import Scheduler
from rl.rollout.sequence import Sequence, SequenceGroup, State, overdue
from rl.rollout.validation import outside

_LATER: Any = object()  # instead of an answer: the step takes its time


class Lifecycle:
    """All groups that have not ended, and what is to be told of them."""

    def __init__(self, scheduler: Scheduler, vocab: int, decode: Callable[[Any], str] | None):
        self._scheduler, self._vocab, self._text = scheduler, vocab, decode
        self.groups: dict[int, SequenceGroup] = {}
        self.failed = 0
        self._done: list[SequenceGroup] = []  # ended, to be handed out
        self._news: list[Sequence] = []  # have tokens that on_tokens has not seen

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing to be handed out."""
        return not (self.groups or self._done)

    # ---- beginnings

    def begin(self, group: SequenceGroup) -> None:
        """Take up a request. Its samples share a prefix until the prompt is in the pool, but for partial ones."""
        self.groups[group.number] = group
        request = group.request
        prompt = request.prompt.tokens.tolist()
        if request.samples > 1 and not request.partial:
            return self._scheduler.enqueue(self._new(group, -1, prompt, None))
        known = {rollout.sample_id: rollout for rollout in request.partial}
        sequences = [self._new(group, sample, list(prompt), request.agent_loop) for sample in sorted(known) or [0]]
        for sequence in sequences:
            if (rollout := known.get(sequence.sample)) is not None:
                sequence.resume_from(rollout)
                if rollout.finish_reason in ("stop", "length"):  # it had ended already
                    sequence.reason = rollout.finish_reason
                    self._end(sequence)
            self.resume(sequence)

    def fan_out(self, prefix: Sequence) -> None:
        """The prompt is in the pool: its samples share it."""
        request = prefix.group.request
        completions = [self._fork_from(prefix, sample, request.agent_loop) for sample in range(request.samples)]
        self._scheduler.end(prefix)
        for completion in completions:
            self.resume(completion)

    def _new(self, group: SequenceGroup, sample: int, tokens: list[int], agent_loop: AgentLoop | None) -> Sequence:
        sequence = Sequence(group, sample, tokens, agent_loop)
        group.sequences.append(sequence)
        return sequence

    def _fork_from(self, parent: Sequence, sample: int, agent_loop: AgentLoop) -> Sequence:
        completion = self._new(parent.group, sample, list(parent.tokens), agent_loop)
        completion.inherit(parent)
        self._scheduler.kv_cache.share(parent, completion)
        return completion

    # ---- programs

    def resume(self, sequence: Sequence, answer: Any = None, failure: Exception | None = None) -> None:
        """Let its program go on with the answer to its last command, until it wants tokens drawn, waits, or ends."""
        while not sequence.ended:  # as it is once a step has made the request fail
            try:
                command = sequence.advance(answer, failure)
            except StopIteration:
                return self._end(sequence)
            except Exception as error:
                return self.fail(sequence, repr(error))
            try:
                answer, failure = self._take_up(sequence, command), None
            except UserError as error:  # a step that cannot be taken: the program is told
                answer, failure = None, error
            if answer is _LATER:
                return None

    def _take_up(self, sequence: Sequence, command: Command) -> Any:
        """The answer to the command, or _LATER. Raises UserError if it cannot be taken."""
        match command:
            case Generate():
                sequence.begin(command, self._text)
                if sequence.limit > len(sequence.tokens):
                    self._scheduler.enqueue(sequence)
                    return _LATER
                sequence.reason = "length"
                return "length"
            case Observe():
                return self._observe(sequence, command)
            case Fork():
                return self._fork(sequence, command)
            case Wait() | Join():
                _check_wait(sequence, command)
                sequence.waits_for = command
                self._scheduler.park(sequence)
                return _LATER
            case _:
                raise UserError(
                    f"{sequence.name}: its agent loop yielded {command!r}; expected Generate, Observe and so on"
                )

    def _observe(self, sequence: Sequence, command: Observe) -> int:
        tokens = np.asarray(command.tokens, np.int64)
        if (wrong := outside(tokens, self._vocab)) is not None:
            raise UserError(f"{sequence.name} observes token {wrong}; the vocabulary is 0 to {self._vocab - 1}")
        taken = sequence.observe(tokens.tolist(), self._scheduler.version)
        self.tell(sequence)
        return taken

    def _fork(self, sequence: Sequence, command: Fork) -> list[Sequence]:
        taken = {one.sample for one in sequence.group.sequences}
        for sample in command.samples:
            if sample in taken or not 0 <= sample < 1 << 32:
                raise UserError(
                    f"{sequence.name} forks to sample {sample}; its draws need an id of their own, 0 to 2**32 - 1"
                )
            taken.add(sample)
        completions = [self._fork_from(sequence, sample, command.agent_loop) for sample in command.samples]
        for completion in completions:
            self.resume(completion)
        return completions

    def poll(self) -> None:
        """Deadlines, and those that wait for something which has come."""
        for group in [group for group in self.groups.values() if overdue(group)]:
            self.cut(group, "deadline")
        for sequence in list(self._scheduler.parked):
            if sequence.ended:
                continue  # its request was cut meanwhile
            match sequence.waits_for:
                case Wait(future) if future.done():
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, *_outcome(future))
                case Join(completions) if all(completion.ended for completion in completions):
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, [completion.rollout() for completion in completions])

    # ---- ends

    def leave_row(self, sequence: Sequence, reason: FinishReason) -> None:
        """It has drawn what its step asked for."""
        sequence.reason = reason
        self._scheduler.withdraw(sequence)
        self.resume(sequence, reason)

    def fail(self, sequence: Sequence, why: str) -> None:
        """End its request with an error."""
        self.failed += 1
        sequence.group.error = f"{sequence.name}: {why}"
        self.cut(sequence.group, "error")

    def cut(self, group: SequenceGroup, reason: FinishReason) -> None:
        """End what is left of a request."""
        for sequence in [one for one in group.sequences if not one.ended]:
            sequence.reason = reason
            self._scheduler.end(sequence)
            try:
                sequence.close()
            except Exception as error:  # of the program's own last words
                group.error = group.error or f"{sequence.name}, when ended: {error!r}"
            if sequence.is_prefix:  # its samples were still to come
                for sample in range(group.request.samples):
                    completion = self._new(group, sample, list(sequence.tokens), single_turn)
                    completion.reason, completion.state = reason, State.ENDED
        self._settle(group)

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        self._settle(sequence.group)

    def _settle(self, group: SequenceGroup) -> None:
        if group.ended and self.groups.pop(group.number, None) is not None:
            self._done.append(group)

    # ---- what is told

    def tell(self, sequence: Sequence) -> None:
        """It has new tokens."""
        if sequence.group.on_tokens is not None:
            self._news.append(sequence)

    def hand_out(self) -> list[RequestOutput]:
        """What has finished; tells the streams what there is before."""
        news, self._news = self._news, []
        for sequence in news:
            try:
                sequence.report()
            except Exception as error:
                if sequence.group.error is None:
                    self.fail(sequence, f"on_tokens raised {error!r}")
        done, self._done = self._done, []
        return [group.finished() for group in done]


def _check_wait(sequence: Sequence, command: Wait | Join) -> None:
    if isinstance(command, Wait) and not isinstance(command.future, Future):
        raise UserError(f"{sequence.name} waits for {command.future!r}; expected a concurrent.futures.Future")
    if isinstance(command, Join) and any(completion is sequence for completion in command.completions):
        raise UserError(f"{sequence.name} joins itself, which would never end")


def _outcome(future: Future[Any]) -> tuple[Any, Exception | None]:
    """What a finished future gives: its result, or its exception."""
    try:
        error = future.exception()
    except CancelledError as cancelled:
        error = cancelled
    if error is None:
        return future.result(), None
    if isinstance(error, Exception):
        return None, error
    return None, RuntimeError(f"what was waited for ended with {error!r}")  # a tool's exit must not be the engine's
