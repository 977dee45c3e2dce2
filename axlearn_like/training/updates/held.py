"""A step that holds frozen parameters apart from what it changes."""

from collections.abc import Mapping
from typing import Any

from axlearn_like.layers.parameter_names import merged, only, without
from axlearn_like.learner import Learner
from axlearn_like.learner.schedules import given_rate
from axlearn_like.training.losses import Metrics
from axlearn_like.training.updates.programs import Calls, ProgramCall, State, Step, StepProgram, run_calls


class HeldStep:
    """`step(state, inputs)` that moves what changes: frozen parameters go in undonated, and come back as they are.

    So several trainers can hold the same arrays of a base.

    Attributes:
        step: program `(state without frozen parameters, {"held", "inputs"}) -> (such a state, metrics)`.
        rate: from the number of applied updates to the learning rate, if the learner's schedule is `GivenRate`.
    """

    rate: Any = None

    def __init__(self, step: Step, learner: Learner, like: State | None, compiler_options: Mapping[str, str] | None):
        """Take a pure step over whole states, and the other arguments of `make_train_step`."""

        def moved(moving: State, parts: Any) -> tuple[State, Metrics]:
            whole = {**moving, "params": merged(parts["held"], moving["params"])}
            with given_rate(parts.get("rate")):
                state, metrics = step(whole, parts["inputs"])
            return self.parted(state)[0], metrics

        self._learner = learner
        options = step_options(learner, None if like is None else self.parted(like)[0], compiler_options)
        self.step: Any = StepProgram(moved, **options)

    def parted(self, state: State) -> tuple[State, Any]:
        """Return a state without its frozen parameters, and those."""
        params, names = state["params"], self._learner.frozen(state["params"])
        return {**state, "params": without(params, names)}, only(params, names)

    def __call__(self, state: State, inputs: Any) -> tuple[State, Metrics]:
        """Return the state after the update, and metrics; all of the state but its frozen parameters is donated."""
        return run_calls(self.calls(state, inputs))

    def calls(self, state: State, inputs: Any) -> Calls:
        """Return the update call by call."""
        moving, held = self.parted(state)
        parts = {"held": held, "inputs": inputs}
        if self.rate is not None:
            parts["rate"] = self.rate(state["opt_state"]["applied"])
        moving, metrics = yield ProgramCall(self.step, moving, parts)
        return {**moving, "params": merged(held, moving["params"])}, metrics

    def trace(self, state: State, inputs: Any) -> Any:
        """Return the trace of the program that a call runs."""
        moving, held = self.parted(state)
        return self.step.trace(moving, {"held": held, "inputs": inputs})

    def lower(self, state: State, inputs: Any) -> Any:
        """Return that program, lowered."""
        return self.trace(state, inputs).lower()


def step_options(learner: Learner, like: State | None, compiler_options: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the options of `jax.jit` for a step on such a state."""
    options: dict[str, Any] = {"compiler_options": dict(compiler_options)} if compiler_options else {}
    out = None if like is None else learner.step_shardings(like)
    return options if out is None else {**options, "out_shardings": out}
