"""Requests under way: their programs carried from step to step, and how each of them ends.

Whatever a request's own code does (a program, a callback, a tool's future), it is that request which fails.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from mesh import UserError
from rl.roles.messages import FinishReason
from rl.rollout.program import Fork, Generate, Join, Observe, Program, Step, Wait, complete
from rl.rollout.request import Finished
from rl.rollout.scheduler import Scheduler
from rl.rollout.sequence import Sequence, State, Task, overdue
from rl.rollout.validation import outside

_LATER: Any = object()  # instead of an answer: the step takes its time


class Execution:
    """All tasks that have not ended, and what is to be told of them."""

    def __init__(self, scheduler: Scheduler, vocab: int, decode: Callable[[Any], str] | None):
        self._scheduler, self._vocab, self._text = scheduler, vocab, decode
        self.tasks: dict[int, Task] = {}
        self.failed = 0
        self._done: list[Task] = []  # ended, to be handed out
        self._news: list[Sequence] = []  # have tokens that on_tokens has not seen

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing to be handed out."""
        return not (self.tasks or self._done)

    # ---- beginnings

    def begin(self, task: Task) -> None:
        """Take up a request. Its samples share a trunk until the prompt is in the pool, but for partial ones."""
        self.tasks[task.number] = task
        request = task.request
        prompt = request.prompt.tokens.tolist()
        if request.samples > 1 and not request.partial:
            return self._scheduler.enqueue(self._new(task, -1, prompt, None))
        known = {rollout.sample_id: rollout for rollout in request.partial}
        sequences = [self._new(task, sample, list(prompt), request.program) for sample in sorted(known) or [0]]
        for sequence in sequences:
            if (rollout := known.get(sequence.sample)) is not None:
                sequence.go_on_from(rollout)
                if rollout.finish_reason in ("stop", "length"):  # it had ended already
                    sequence.reason = rollout.finish_reason
                    self._end(sequence)
            self.resume(sequence)

    def fan_out(self, trunk: Sequence) -> None:
        """The prompt is in the pool: its samples share it."""
        request = trunk.task.request
        branches = [self._branch(trunk, sample, request.program) for sample in range(request.samples)]
        self._scheduler.end(trunk)
        for branch in branches:
            self.resume(branch)

    def _new(self, task: Task, sample: int, tokens: list[int], program: Program | None) -> Sequence:
        sequence = Sequence(task, sample, tokens, program)
        task.sequences.append(sequence)
        return sequence

    def _branch(self, parent: Sequence, sample: int, program: Program) -> Sequence:
        branch = self._new(parent.task, sample, list(parent.tokens), program)
        branch.inherit(parent)
        self._scheduler.memory.share(parent, branch)
        return branch

    # ---- programs

    def resume(self, sequence: Sequence, answer: Any = None, failure: Exception | None = None) -> None:
        """Let its program go on with the answer to its last step, until it wants tokens drawn, waits, or ends."""
        while not sequence.ended:  # as it is once a step has made the request fail
            try:
                step = sequence.advance(answer, failure)
            except StopIteration:
                return self._end(sequence)
            except Exception as error:
                return self.fail(sequence, repr(error))
            try:
                answer, failure = self._take_up(sequence, step), None
            except UserError as error:  # a step that cannot be taken: the program is told
                answer, failure = None, error
            if answer is _LATER:
                return None

    def _take_up(self, sequence: Sequence, step: Step) -> Any:
        """The answer to the step, or _LATER. Raises UserError if it cannot be taken."""
        match step:
            case Generate():
                sequence.begin(step, self._text)
                if sequence.limit > len(sequence.tokens):
                    self._scheduler.enqueue(sequence)
                    return _LATER
                sequence.reason = "length"
                return "length"
            case Observe():
                return self._observe(sequence, step)
            case Fork():
                return self._fork(sequence, step)
            case Wait() | Join():
                _check_wait(sequence, step)
                sequence.waits_for = step
                self._scheduler.park(sequence)
                return _LATER
            case _:
                raise UserError(f"{sequence.name}: its program yielded {step!r}; expected Generate, Observe and so on")

    def _observe(self, sequence: Sequence, step: Observe) -> int:
        tokens = np.asarray(step.tokens, np.int64)
        if (wrong := outside(tokens, self._vocab)) is not None:
            raise UserError(f"{sequence.name} observes token {wrong}; the vocabulary is 0 to {self._vocab - 1}")
        taken = sequence.observe(tokens.tolist(), self._scheduler.version)
        self.tell(sequence)
        return taken

    def _fork(self, sequence: Sequence, step: Fork) -> list[Sequence]:
        taken = {one.sample for one in sequence.task.sequences}
        for sample in step.samples:
            if sample in taken or not 0 <= sample < 1 << 32:
                raise UserError(
                    f"{sequence.name} forks to sample {sample}; its draws need an id of their own, 0 to 2**32 - 1"
                )
            taken.add(sample)
        branches = [self._branch(sequence, sample, step.program) for sample in step.samples]
        for branch in branches:
            self.resume(branch)
        return branches

    def poll(self) -> None:
        """Deadlines, and those that wait for something which has come."""
        for task in [task for task in self.tasks.values() if overdue(task)]:
            self.cut(task, "deadline")
        for sequence in list(self._scheduler.parked):
            if sequence.ended:
                continue  # its request was cut meanwhile
            match sequence.waits_for:
                case Wait(future) if future.done():
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, *_outcome(future))
                case Join(branches) if all(branch.ended for branch in branches):
                    self._scheduler.withdraw(sequence)
                    self.resume(sequence, [branch.rollout() for branch in branches])

    # ---- ends

    def leave_row(self, sequence: Sequence, reason: FinishReason) -> None:
        """It has drawn what its step asked for."""
        sequence.reason = reason
        self._scheduler.withdraw(sequence)
        self.resume(sequence, reason)

    def fail(self, sequence: Sequence, why: str) -> None:
        """End its request with an error."""
        self.failed += 1
        sequence.task.error = f"{sequence.name}: {why}"
        self.cut(sequence.task, "error")

    def cut(self, task: Task, reason: FinishReason) -> None:
        """End what is left of a request."""
        for sequence in [one for one in task.sequences if not one.ended]:
            sequence.reason = reason
            self._scheduler.end(sequence)
            try:
                sequence.close()
            except Exception as error:  # of the program's own last words
                task.error = task.error or f"{sequence.name}, when ended: {error!r}"
            if sequence.is_trunk:  # its samples were still to come
                for sample in range(task.request.samples):
                    branch = self._new(task, sample, list(sequence.tokens), complete)
                    branch.reason, branch.state = reason, State.ENDED
        self._settle(task)

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        self._settle(sequence.task)

    def _settle(self, task: Task) -> None:
        if task.ended and self.tasks.pop(task.number, None) is not None:
            self._done.append(task)

    # ---- what is told

    def tell(self, sequence: Sequence) -> None:
        """It has new tokens."""
        if sequence.task.on_tokens is not None:
            self._news.append(sequence)

    def hand_out(self) -> list[Finished]:
        """What has finished; tells the streams what there is before."""
        news, self._news = self._news, []
        for sequence in news:
            try:
                sequence.report()
            except Exception as error:
                if sequence.task.error is None:
                    self.fail(sequence, f"on_tokens raised {error!r}")
        done, self._done = self._done, []
        return [task.finished() for task in done]


def _check_wait(sequence: Sequence, step: Wait | Join) -> None:
    if isinstance(step, Wait) and not isinstance(step.future, Future):
        raise UserError(f"{sequence.name} waits for {step.future!r}; expected a concurrent.futures.Future")
    if isinstance(step, Join) and any(branch is sequence for branch in step.branches):
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
