"""The lifecycle of requests: their agent loops run command by command, and every way in which they end.

An error in a request's own code (an agent loop, a callback, a tool's future) fails that request alone.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from mesh import UserError
from rl.protocol.messages import FinishReason
from rl.rollout.agent_loops.commands import AgentLoop, Command, Fork, Generate, Join, Observe, Spawn, Wait, single_turn
from rl.rollout.model_runner.adapter_slots import LoadedAdapter
from rl.rollout.request import RequestOutput
from rl.rollout.scheduling.scheduler import Scheduler
from rl.rollout.scheduling.spawning import Spawning, check_join, known
from rl.rollout.scheduling.watching import Watching
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.validation import check_segments, outside

_PENDING: Any = object()  # the answer of a command that takes its time


class Lifecycle:
    """All unfinished requests, and the outputs and tokens to report."""

    def __init__(
        self,
        scheduler: Scheduler,
        vocab: int,
        decode: Callable[[Any], str] | None,
        spawning: Spawning,
        on_end: Callable[[SequenceGroup], None] | None = None,
    ):
        """`decode` gives the text of tokens; `on_end` is called with each request that has ended."""
        self._scheduler, self._vocab, self._decode = scheduler, vocab, decode
        self.groups: dict[int, SequenceGroup] = {}
        self.failed = 0
        self._on_end = on_end or (lambda group: None)
        self._finished: list[SequenceGroup] = []  # finished, not yet collected
        self._extended: list[Sequence] = []  # sequences with tokens unseen by on_tokens
        self.watching, self._spawning = Watching(), spawning

    @property
    def idle(self) -> bool:
        """True with no request unfinished, and no output to collect."""
        return not (self.groups or self._finished)

    @property
    def submitted(self) -> int:
        """Unfinished requests that were submitted, not spawned."""
        return sum(group.parent is None for group in self.groups.values())

    @property
    def started(self) -> bool:
        """True if a request has started."""
        return any(group.started for group in self.groups.values())

    @property
    def adapters(self) -> set[LoadedAdapter]:
        """The adapters of unfinished requests."""
        groups = self.groups.values()
        return {one for group in groups for one in (group.adapter, *group.policies.values()) if one is not None}

    def clear(self) -> None:
        """Drop all requests and outputs, whatever state they are in."""
        for group in list(self.groups.values()):
            with contextlib.suppress(Exception):  # the state may be broken; what counts is that agent loops are closed
                self.end_group(group, "abort")
        self.groups.clear()
        self._finished, self._extended = [], []
        self._scheduler.clear()

    # ---- starts

    def start(self, group: SequenceGroup) -> None:
        """Start a request. Its samples share the prompt until it is in the pool, except for partial ones."""
        self.groups[group.number] = group
        request = group.request
        prompt = request.prompt.tokens.tolist()
        if (request.samples > 1 or request.prompt_scores) and not request.partial:
            return self._scheduler.enqueue(Sequence(group, -1, prompt, None))
        partial = {rollout.sample_id: rollout for rollout in request.partial}
        sequences = [Sequence(group, sample, list(prompt), request.agent_loop) for sample in sorted(partial) or [0]]
        for sequence in sequences:
            if (rollout := partial.get(sequence.sample)) is not None and sequence.continue_from(rollout):
                self._end(sequence)
            self.resume(sequence)

    def fan_out(self, prefix: Sequence) -> None:
        """Start the samples of a prompt that is in the pool."""
        request = prefix.group.request
        completions = [self._copy(prefix, sample, request.agent_loop) for sample in range(request.samples)]
        self._scheduler.end(prefix)
        for completion in completions:
            self.resume(completion)

    def _copy(self, parent: Sequence, sample: int, agent_loop: AgentLoop) -> Sequence:
        copy = Sequence(parent.group, sample, list(parent.tokens), agent_loop)
        copy.inherit(parent)
        self._scheduler.kv_cache.share(parent, copy)
        return copy

    # ---- agent loops

    def resume(self, sequence: Sequence, answer: Any = None, failure: Exception | None = None) -> None:
        """Run an agent loop on from the answer to its last command, until it draws tokens, waits, or ends."""
        while not sequence.ended:  # true, too, once a command made the request fail
            try:
                command = sequence.advance(answer, failure)
            except StopIteration as ended:
                return self._end(sequence, ended.value)
            except Exception as error:
                return self.fail(sequence, repr(error))
            try:
                answer, failure = self._execute(sequence, command), None
            except UserError as error:  # raised in the loop
                answer, failure = None, error
            if answer is _PENDING:
                return None

    def _execute(self, sequence: Sequence, command: Command) -> Any:
        """Return the answer to the command, or _PENDING. Raises UserError if it cannot be carried out."""
        match command:
            case Generate():
                if not sequence.generate(command, self._decode):
                    return "length"
                self._scheduler.enqueue(sequence)
                return _PENDING
            case Observe():
                return self._observe(sequence, command)
            case Fork():
                return self._fork(sequence, command)
            case Spawn():
                child = self._spawning.spawn(sequence, command)
                self.groups[child.group.number] = child.group
                self.resume(child)
                return child
            case Wait() | Join():
                _check_wait(sequence, command)
                self._scheduler.suspend(sequence, command)
                return _PENDING
            case _:
                expected = "Generate, Observe, Wait, Fork, Spawn or Join"
                raise UserError(f"{sequence.name}: its agent loop yielded {command!r}; expected {expected}")

    def _observe(self, sequence: Sequence, command: Observe) -> int:
        tokens = np.asarray(command.tokens, np.int64)
        if (wrong := outside(tokens, self._vocab)) is not None:
            raise UserError(f"{sequence.name} observes token {wrong}; the vocabulary is 0 to {self._vocab - 1}")
        check_segments(command.segments, len(tokens), sequence.name)
        version = sequence.group.version(self._scheduler.version)
        taken = sequence.observe(tokens.tolist(), version, command.segments)
        self.extended(sequence)
        return taken

    def _fork(self, sequence: Sequence, command: Fork) -> list[Sequence]:
        taken = {one.sample for one in sequence.group.sequences}
        for sample in command.samples:
            if sample in taken or not 0 <= sample < 1 << 32:
                raise UserError(
                    f"{sequence.name} forks to sample {sample}; its draws need an id of their own, 0 to 2**32 - 1"
                )
            taken.add(sample)
        completions = [self._copy(sequence, sample, command.agent_loop) for sample in command.samples]
        for completion in completions:
            self.resume(completion)
        return completions

    def poll(self) -> None:
        """End requests that are overdue, and resume loops whose wait is over."""
        for group in [group for group in self.groups.values() if group.overdue]:
            self.end_group(group, "deadline")
        for sequence in list(self._scheduler.suspended):
            if sequence.ended:
                continue  # request ended in this loop
            match sequence.waits_for:
                case Wait(future) if future.done():
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, *_outcome(future))
                case Wait(_, seconds) if sequence.waited_too_long:
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, None, TimeoutError(f"not done after {seconds:g} s"))
                case Join() as join if (answer := known(join)) is not None:
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, *answer)

    # ---- ends

    def generated(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a Generate command: the sequence leaves its row, and its loop runs on."""
        if sequence.watched is not None:
            self.watching.feed([sequence])
            if self.watching.settle():  # aborted within the last tokens
                return self._abort(sequence)
        sequence.stop(reason)
        self._scheduler.withdraw(sequence)
        return self.resume(sequence, reason)

    def abort_draws(self) -> list[Sequence]:
        """End the draws that their watches have aborted, once these have read all tokens; returns the sequences."""
        aborted = [sequence for sequence in self.watching.settle() if not sequence.ended]
        for sequence in aborted:
            self._abort(sequence)
        return aborted

    def _abort(self, sequence: Sequence) -> None:
        assert sequence.watched is not None and sequence.watched.abort is not None
        kept, reason = sequence.watched.first + sequence.watched.abort.kept, sequence.watched.abort.reason
        sequence.cut(kept)
        sequence.stop("watch")
        self.extended(sequence)
        self._scheduler.withdraw(sequence)
        self.resume(sequence, reason)

    def fail(self, sequence: Sequence, why: str) -> None:
        """End the request of a sequence with an error."""
        self.failed += 1
        sequence.group.error = f"{sequence.name}: {why}"
        self.end_group(sequence.group, "error")

    def end_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """End what is left of a request."""
        for sequence in [one for one in group.sequences if not one.ended]:
            self._scheduler.end(sequence, reason)
            try:
                sequence.close()
            except Exception as error:  # errors of the loop's own clean-up
                group.error = group.error or f"{sequence.name}, when ended: {error!r}"
            self._end_children(sequence)
            if sequence.is_prefix:  # samples had not started
                for sample in range(group.request.samples):
                    Sequence(group, sample, list(sequence.tokens), single_turn).end(reason)
        self._finish_if_ended(group)

    def _end(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        self._scheduler.end(sequence, reason)
        self._end_children(sequence)
        self._finish_if_ended(sequence.group)

    def _end_children(self, sequence: Sequence) -> None:
        for group in sequence.children:
            self.end_group(group, "abort")

    def _finish_if_ended(self, group: SequenceGroup) -> None:
        if group.ended and self.groups.pop(group.number, None) is not None:
            if group.parent is None:
                self._finished.append(group)
            self._on_end(group)

    # ---- reports

    def extended(self, sequence: Sequence) -> None:
        """Note that a sequence has new tokens."""
        if sequence.group.on_tokens is not None or sequence.watched is not None:
            self._extended.append(sequence)

    def collect(self) -> list[RequestOutput]:
        """Call on_tokens for new tokens, have watches read them, and return the outputs of finished requests."""
        extended, self._extended = self._extended, []
        for sequence in extended:
            try:
                sequence.report()
            except Exception as error:
                if sequence.group.error is None:
                    self.fail(sequence, f"on_tokens raised {error!r}")
        self.watching.feed([one for one in dict.fromkeys(extended) if one.watched is not None and not one.ended])
        finished, self._finished = self._finished, []
        return [group.output() for group in finished]


def _check_wait(sequence: Sequence, command: Wait | Join) -> None:
    if isinstance(command, Wait) and not isinstance(command.future, Future):
        raise UserError(f"{sequence.name} waits for {command.future!r}; expected a concurrent.futures.Future")
    if isinstance(command, Join):
        check_join(sequence, command)


def _outcome(future: Future[Any]) -> tuple[Any, Exception | None]:
    """Return the result of a finished future, or its exception."""
    try:
        error = future.exception()
    except CancelledError as cancelled:
        error = cancelled
    if error is None:
        return future.result(), None
    if isinstance(error, Exception):
        return None, error
    return None, RuntimeError(f"what was waited for ended with {error!r}")  # a tool's exit must not be the engine's
