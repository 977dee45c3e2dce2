"""Updates of supervised training: batches of an input, and what follows them."""

from collections.abc import Callable, Mapping
from typing import Any

from axlearn_like.input import SupervisedInput
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.replicas import Replicas
from axlearn_like.training.step import State
from mesh import shard_batch


class SupervisedUpdates:
    """Updates by a `SupervisedInput`; a reference policy and a plan of replicas follow them, if there are such."""

    waits = False
    tokens = "tokens"

    def __init__(self, data: SupervisedInput, flops: float | None = None):
        """`flops`: model FLOPs of an update, if known."""
        self._data, self.flops = data, flops
        self.whole = False  # batches stay in host memory, for a step that shards parts of them
        self.reference: Reference | None = None
        self.replicas: Replicas | None = None
        self.saved_as: Callable[[State], State] = lambda state: state  # the state as checkpoints have it

    def next(self, step: int, state: State, timeout: float) -> Any:
        """Return the next batch, sharded if it is not to be whole."""
        if self.whole:
            return next(self._data)
        batch = shard_batch(next(self._data), rows=self._data.batch_size)
        return batch if self.replicas is None else self.replicas.added(batch)

    def metrics(self) -> Mapping[str, Any]:
        """Return those of the input."""
        return self._data.metrics()

    def updated(self, step: int, state: State, metrics: Mapping[str, Any]) -> None:
        """Let reference and replicas follow."""
        if self.reference is not None:
            self.reference.updated(step, state["params"])
        if self.replicas is not None:
            self.replicas.updated(step, metrics)

    def checkpoint(self, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state, with what a reference holds, the input's position, and the plan of replicas."""
        held = {} if self.reference is None else self.reference.saved()
        plan = {} if self.replicas is None else {"replicas": self.replicas.state()}
        return {**self.saved_as(state), **held}, {"input": self._data.state(), **plan}

    def restore(self, extras: Mapping[str, Any]) -> None:
        """Go to the input's position of a checkpoint, and to its plan."""
        self._data.restore(extras["input"])
        if self.replicas is not None:
            self.replicas.restore(extras.get("replicas"))

    def close(self) -> None:
        """End the input's workers."""
        self._data.close()
