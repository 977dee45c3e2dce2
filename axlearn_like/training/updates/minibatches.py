"""Several updates by one batch: a step that calls the train step once for each of them, or not at all."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.training.losses import Metrics
from axlearn_like.training.step import State, Step, calls_of
from axlearn_like.training.updates.programs import Calls, run_calls

_LATEST = ("lr", "skipped", "spikes")  # metrics of which the last update's value holds for the batch


class MinibatchStep:
    """`step(state, minibatches) -> (state, metrics)`: an update by each minibatch, in order; one of the state's steps.

    Without any, nothing is computed: parameters and optimizer state are the same arrays as before, and so the schedule
    stands still. All updates together are atomic: a state is seen, and saved, before the first or after the last one.

    Attributes:
        step: the train step, of one minibatch.
    """

    def __init__(self, step: Step, *, until: Callable[[Metrics], bool] = lambda metrics: False):
        """Take the train step. `until(metrics)`: True ends the batch after the update that has these metrics."""
        self.step, self._until = step, until
        self._next: Any = jax.jit(lambda count: count + 1)
        self._number: Any = jax.jit(lambda count, number: number + 0.0 * count)  # placed with the state
        self._means: Any = jax.jit(_means)

    def __call__(self, state: State, minibatches: Iterable[Any]) -> tuple[State, Metrics]:
        """Return the state after the updates, which is donated, and their metrics.

        `updates` counts them; `*_max` are the largest, counters the latest, and others means over the updates.
        """
        return run_calls(self.calls(state, minibatches))

    def calls(self, state: State, minibatches: Iterable[Any]) -> Calls:
        """Return the updates call by call."""
        count = self._next(state["step"])  # count of batches, not of updates
        found: list[Metrics] = []
        for minibatch in minibatches:
            state, metrics = yield from calls_of(self.step, state, minibatch)
            found.append(metrics)
            if self._until(metrics):
                break
        state = {**state, "step": count}
        if not found:
            return state, {name: self._number(count, 0.0) for name in ("loss", "updates")}
        metrics = found[0] if len(found) == 1 else self._means(found)
        return state, {**metrics, "updates": self._number(count, float(len(found)))}


def _means(found: list[Metrics]) -> Metrics:
    def combined(name: str) -> jax.Array:
        values = jnp.stack([metrics[name] for metrics in found])
        if name in _LATEST:
            return values[-1]
        return jnp.max(values) if name.endswith("_max") else jnp.mean(values)

    return {name: combined(name) for name in found[0]}
