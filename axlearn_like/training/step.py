"""The train state and the one jitted step over it, with gradient accumulation."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.layers.parameter_names import merged, only, path_name, without
from axlearn_like.layers.wrappers.low_rank.matrices import dropout_key
from axlearn_like.learner import Learner
from axlearn_like.learner.schedules import Schedule
from axlearn_like.training.losses import LossFn, Metrics
from axlearn_like.training.updates.held import HeldStep, step_options
from axlearn_like.training.updates.programs import Calls, ProgramCall, State, Step, StepProgram, run_calls
from mesh.errors import UserError
from mesh.sharding import split_rows

SHARED = "shared"  # name in a batch of arrays that have no rows: every slice has them whole


def init_state(params: Any, learner: Learner) -> State:
    """Return the state before the first update.

    Pure: call it inside the jitted initialisation, then arrays are born sharded. The state holds
    `params` themselves and the step donates it: a caller who needs them later keeps a copy.
    """
    return {"step": jnp.zeros((), jnp.int32), **learner.first_state(params)}


def make_train_step(
    loss_fn: LossFn,
    learner: Learner,
    microbatches: int = 1,
    *,
    like: State | None = None,
    compiler_options: Mapping[str, str] | None = None,
    dropout: int | None = None,
) -> Step:
    """Return the jitted `step(state, batch) -> (state, metrics)`; the state is donated.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)` of what the learner trains, with the loss and every metric
            additive over slices of the batch (metrics called `*_max`: combined by maximum). Then gradient and
            metrics do not depend on `microbatches`, however uneven the masks are.
        microbatches: slices computed one after another; divides the first axis of every array in
            the batch. Arrays without axes (scalars), and those under `SHARED`, are shared by all slices.
        like: a state, abstract or not, with shardings; needed if the learner keeps some of it on the host.
        dropout: seed of what layers drop out; None: nothing is.

    Returns:
        The step. Its metrics are those of `loss_fn` and of the learner. `state["step"]` counts
        every call, applied or skipped: it says how much data was consumed. Parameters that the
        learner holds frozen are neither donated nor copied (`HeldStep`).
    """
    if microbatches < 1:
        raise UserError(f"microbatches: expected 1 or more, got {microbatches}")
    differentiated = _differentiated(loss_fn, learner, dropout)

    def gradients(params: Any, batch: Any, step: jax.Array) -> tuple[Any, Metrics]:
        if microbatches == 1:
            (_, metrics), grads = differentiated(params, batch, step, 0)
            return grads, metrics
        sliced, merged = _sliced(batch, microbatches)

        def accumulate(total: Any, numbered: tuple[Any, list[Any]]) -> tuple[Any, Metrics]:
            number, slices = numbered
            (_, metrics), grads = differentiated(params, merged(slices), step, number)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), metrics

        # Sums of many small terms lose bits in bfloat16: accumulate in float32 whatever the
        # parameters are.
        zeros = _zeros(learner, params)
        numbers = None if dropout is None else jnp.arange(microbatches)
        grads, metrics = jax.lax.scan(accumulate, zeros, (numbers, sliced))
        return grads, {name: combined(name, values) for name, values in metrics.items()}

    def step(state: State, batch: Any) -> tuple[State, Metrics]:
        grads, metrics = gradients(learner.trained(state), batch, state["step"])
        return _updated(learner, state, grads, metrics)

    return _jitted(step, learner, like, compiler_options)


class AccumulatedStep:
    """`step(state, batches)` on batches of several shapes: their gradients are summed, then there is one update.

    A program is compiled for each shape, and one for the update. Loss and metrics of batches add up as in
    `make_train_step`.

    Attributes:
        accumulate: program `(sums, {"held", "params", "rows"}) -> (sums, {})` with gradients and metrics of one batch.
        trained: returns these parameters, out of a state.
        update: `(state, sums) -> (state, metrics)`, as `make_train_step` returns it.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        learner: Learner,
        *,
        like: State | None = None,
        compiler_options: Mapping[str, str] | None = None,
    ):
        """Take the arguments of `make_train_step`."""
        options = step_options(learner, None, compiler_options)
        differentiated = _differentiated(loss_fn, learner)

        def accumulate(sums: Any, inputs: Any) -> Any:
            (_, metrics), grads = differentiated(merged(inputs["held"], inputs["params"]), inputs["rows"])
            added = {
                "grads": jax.tree.map(lambda t, g: t + g.astype(t.dtype), sums["grads"], grads),
                "metrics": {
                    name: combined(name, jnp.stack([sums["metrics"][name], value])) for name, value in metrics.items()
                },
            }
            return added, {}

        def update(state: State, sums: Any) -> tuple[State, Metrics]:
            return _updated(learner, state, sums["grads"], sums["metrics"])

        self._loss_fn, self._learner, self._options = loss_fn, learner, options
        self.trained: Callable[[State], Any] = learner.trained
        self._empty: Any = None
        self.accumulate: Any = StepProgram(accumulate, **options)
        self.update: Any = _jitted(update, learner, like, compiler_options)

    def empty(self, params: Any, rows: Any) -> Any:
        """Return the sums before the first batch; pure. `rows` is any batch."""
        metrics = jax.eval_shape(self._loss_fn, params, rows)[1]
        grads = _zeros(self._learner, params)
        least = {name: -jnp.inf if name.endswith("_max") else 0 for name in metrics}
        return {"grads": grads, "metrics": {name: jnp.full((), least[name], m.dtype) for name, m in metrics.items()}}

    def parted(self, state: State) -> dict[str, Any]:
        """Return the parameters of which `accumulate` takes gradients, and the others."""
        params, held = _parted(self._learner, self._learner.trained(state))
        return {"held": held, "params": params}

    def __call__(self, state: State, batches: Sequence[Any]) -> tuple[State, Metrics]:
        """Return the state after the update, and metrics; the state is donated."""
        return run_calls(self.calls(state, batches))

    def calls(self, state: State, batches: Sequence[Any]) -> Calls:
        """Return the update call by call."""
        params = self.trained(state)
        if self._empty is None:
            rows = jax.eval_shape(lambda: batches[0])
            self._empty = jax.jit(lambda params: self.empty(params, rows), **self._options)
        sums = self._empty(params)
        for rows in batches:
            sums, _ = yield ProgramCall(self.accumulate, sums, {**self.parted(state), "rows": rows})
        return (yield from calls_of(self.update, state, sums))


def calls_of(step: Any, state: State, inputs: Any) -> Calls:
    """Return a step's update call by call; one of another kind is one call, of what it is."""
    if isinstance(step, HeldStep | AccumulatedStep):
        return (yield from step.calls(state, inputs))
    return (yield ProgramCall(step, state, inputs))


def program_of(step: Any) -> StepProgram:
    """Return the program of the update of a step with frozen parameters."""
    return program_of(step.update) if isinstance(step, AccumulatedStep) else step.step


def at_rate(step: Any, schedule: Schedule) -> Any:
    """Return a step whose learner's schedule is `GivenRate` at the rates of a schedule; its program is the same one.

    `step`: of `make_train_step`, or an `AccumulatedStep`, with frozen parameters.
    """
    given = copy.copy(step)
    if isinstance(given, AccumulatedStep):
        given.update = at_rate(given.update, schedule)
    else:
        given.rate = jax.jit(lambda count: schedule(count) + 0.0 * count)  # placed with the state
    return given


def _jitted(step: Step, learner: Learner, like: State | None, compiler_options: Mapping[str, str] | None) -> Any:
    if learner.freezes:
        return HeldStep(step, learner, like, compiler_options)
    return jax.jit(step, donate_argnums=0, **step_options(learner, like, compiler_options))


def _differentiated(loss_fn: LossFn, learner: Learner, dropout: int | None = None) -> Callable[..., Any]:
    """Return the loss and its gradient by what is not frozen, so that no gradient of the rest is stored.

    At a place of the run (step, number of the microbatch) the same is dropped out.
    """

    def differentiated(params: Any, batch: Any, *place: Any) -> Any:
        learned, held = _parted(learner, params)
        whole = lambda some: loss_fn(merged(held, some) if held else some, batch)  # noqa: E731
        value_and_grad = jax.value_and_grad(whole, has_aux=True)
        if dropout is None:
            return value_and_grad(learned)
        key = jax.random.key(dropout)
        for number in place:
            key = jax.random.fold_in(key, number)
        with dropout_key(key):
            return value_and_grad(learned)

    return differentiated


def _parted(learner: Learner, params: Any) -> tuple[Any, Any]:
    """Return what a gradient is needed of, and the rest."""
    names = learner.held(params)
    learned = without(params, names) if names else params
    for path, leaf in jax.tree_util.tree_leaves_with_path(learned):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            expected = "ParameterGroup.Config(frozen=True), after that of what is trained (*/lora/*)"
            raise UserError(f"learner.groups: {path_name(path)} has {leaf.dtype} numbers; expected {expected}")
    return learned, only(params, names) if names else {}


def _zeros(learner: Learner, params: Any) -> Any:
    """Return float32 zeros in the place of the parameters that are not frozen, to sum gradients in."""
    return jax.tree.map(zeros_like, _parted(learner, params)[0])


def zeros_like(x: jax.Array) -> jax.Array:
    """Return float32 zeros in the shape of x, sharded as it is, to sum in."""
    return jnp.zeros_like(x, dtype=jnp.float32)


def _sliced(batch: Any, count: int) -> tuple[list[jax.Array | None], Callable[[list[Any]], Any]]:
    """Return the arrays of a batch as [count, rows, ...], None for shared ones, and a function that makes a slice."""
    named, treedef = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [x for _, x in named]
    sliced = [_split(x, count) if x.ndim and not _is_shared(path) else None for path, x in named]

    def merged(slices: list[Any]) -> Any:
        return jax.tree.unflatten(treedef, [x if s is None else s for x, s in zip(leaves, slices, strict=True)])

    return sliced, merged


def _updated(learner: Learner, state: State, grads: Any, metrics: Metrics) -> tuple[State, Metrics]:
    """Return the state after the learner's update by these gradients, and all metrics."""
    if held := _parted(learner, learner.trained(state))[1]:
        grads = merged(jax.tree.map(zeros_like, held), grads)
    parts, learned = learner.next_state(state, grads)
    return {"step": state["step"] + 1, **parts}, {**metrics, **learned}


def combined(name: str, values: jax.Array) -> jax.Array:
    """Return one metric over the microbatches: the largest for names that end in `_max`, else the sum."""
    return jnp.max(values, axis=0) if name.endswith("_max") else jnp.sum(values, axis=0, dtype=values.dtype)


def _is_shared(path: tuple[Any, ...]) -> bool:
    return bool(path) and path[0] == jax.tree_util.DictKey(SHARED)


def _split(x: jax.Array, count: int) -> jax.Array:
    """[batch, ...] -> [count, batch / count, ...]."""
    if x.shape[0] % count:
        raise UserError(f"a batch of {x.shape[0]} rows does not divide into {count} microbatches")
    return split_rows(x, count)
