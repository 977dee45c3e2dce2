"""Updates of several policies by one run of a program: a loop over their adapters, optimizer states and batches.

The frozen base is an argument that they share. A turn of the loop is the update of one policy. A loop has a fixed width
and makes as many turns as it is asked for, so there is one program for policies of one structure (model, rank,
objective, shape of a batch), however many of them have a batch.

A policy that is the only one is updated by such a loop, too. In a program without a loop XLA may fuse other operations,
and so round otherwise; bodies of loops of two widths are the same operations.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import batched
from typing import Any

from axlearn_like.operations.recompilation import CompiledStep
from axlearn_like.training.updates.programs import Calls, ProgramCall, run_together
from rl.training.trainer import PolicyTrainer

_MOST = 8  # turns of a loop at most: it holds as many adapters and optimizer states twice
_LEAST = 2  # turns of a loop at least: with one, XLA drops slices of the whole, and so has other operations

Attempt = Callable[[str, Callable[[], Any]], Any]  # a call for a policy; None: it has failed


def width_of(policies: int) -> int:
    """Return the turns of the loop that updates so many policies: as many states are stacked while it runs."""
    return max(_LEAST, min(_MOST, policies))


class JointUpdates:
    """Updates of the policies that share a base."""

    def __init__(self, trainers: Mapping[str, PolicyTrainer], attempt: Attempt):
        """Take the trainers by policy, and what calls something of one of them."""
        self._trainers, self._attempt = dict(trainers), attempt
        found = {name: trainer.shared for name, trainer in trainers.items()}
        self._programs = {name: program for name, program in found.items() if program is not None}
        counts = Counter(self._programs.values())
        self._widths = {program: width_of(count) for program, count in counts.items()}
        self._loops: dict[Any, CompiledStep] = {}

    def add(self, policy: str, trainer: PolicyTrainer) -> None:
        """Take the trainer of a policy that joins or resumes; loops that are compiled keep their width."""
        self._trainers[policy] = trainer
        self._programs.pop(policy, None)
        if (program := trainer.shared) is not None:
            self._programs[policy] = program
            self._widths.setdefault(program, width_of(1))

    def __contains__(self, policy: str) -> bool:
        return policy in self._programs

    def take(self, policy: str) -> Calls | None:
        """Take a policy's next batch; returns its update, call by call. None: it is not there."""
        trainer = self._trainers[policy]
        with trainer.on_mesh():
            batch = trainer.loop.take()
            step: Any = trainer.loop.step_fn
            return None if batch is None else step.calls(trainer.loop.state, batch)

    def make(self, taken: Mapping[str, Calls], stop: Callable[[], bool]) -> bool:
        """Make the updates that `take` has returned, until `stop()`; False if there was none."""
        made = False
        for program in dict.fromkeys(self._programs[name] for name in taken):
            names = [name for name in taken if self._programs[name] is program]
            for some in batched(names, self._widths[program]):
                if not stop():
                    self._make({name: taken[name] for name in some}, self._widths[program])
                    made = True
        return made

    def _make(self, taken: Mapping[str, Calls], width: int) -> None:
        """Make updates of one program, and do what is due after each."""
        trainers = {name: self._trainers[name] for name in taken}
        with next(iter(trainers.values())).on_mesh():  # mesh of all: it is part of the program
            with ExitStack() as profiled:
                for trainer in trainers.values():
                    profiled.enter_context(trainer.loop.profiled())
                done = dict(self._results(taken, width))
            for name, (state, metrics) in done.items():
                self._attempt(name, partial(trainers[name].loop.complete, state, metrics))

    def _results(self, taken: Mapping[str, Calls], width: int) -> Iterator[tuple[str, Any]]:
        """Yield the results of updates: calls of one program and shape run together."""
        results: dict[str, Any] = dict.fromkeys(taken)
        waiting: dict[str, ProgramCall] = {}
        while results:
            for name, result in results.items():
                last, found = self._attempt(name, partial(_next, taken[name], result)) or (False, None)
                if last:
                    yield name, found
                elif found is not None:
                    waiting[name] = found
            kinds = {name: (call.program.step, call.shape) for name, call in waiting.items()}
            kind = next(iter(kinds.values()), None)
            same = [name for name, other in kinds.items() if other == kind]
            results = dict(zip(same, self._run([waiting.pop(name) for name in same], width), strict=True))

    def _run(self, calls: Sequence[ProgramCall], width: int) -> Sequence[Any]:
        """Return the results of calls of one program and shape."""
        if not calls:
            return ()
        guarded, key = calls[0].program, (calls[0].program.step, width, calls[0].shape)
        if key not in self._loops:
            self._loops[key] = guarded.of(guarded.step.of_several(width))
        return run_together(calls, self._loops[key], width)


def _next(calls: Calls, result: Any) -> tuple[bool, Any]:
    """Send the result of the last call; returns False and the next one, or True and the result of the update."""
    try:
        return False, calls.send(result)
    except StopIteration as end:
        return True, end.value
