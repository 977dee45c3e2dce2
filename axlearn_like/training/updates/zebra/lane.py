"""Experts during one update: those of experts' devices in a thread of their own, and those on attention's devices."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.training.step import zeros_like
from axlearn_like.training.updates.zebra.split import ExpertSplit
from axlearn_like.training.updates.zebra.stages import ExpertStages, SentRows
from axlearn_like.training.updates.zebra.transfer import transfer
from mesh.rules import AxisRules, partition, use_mesh

_Key = tuple[int, int]  # layer, microbatch


class ExpertLane:
    """Starts the programs of experts; nothing waits for their results.

    A thread starts those of experts' devices: XLA's CPU client computes the programs that one thread has started one
    after another, on whatever devices they are. The mesh in force elsewhere is that of attention's devices.

    Where each group is a device of a process of its own, both processes call the same in one order, without the thread.
    """

    def __init__(
        self,
        stages: Callable[[int, int], ExpertStages],
        split: ExpertSplit,
        meshes: tuple[Mesh, Mesh],
        rules: AxisRules,
    ):
        """Take how to make the programs of experts from `first` on, so many of them."""
        self._split, self._meshes, self._rules = split, meshes, rules
        self.overlap = True  # False: every program is waited for before the next one starts, to compare with
        self._here, self._there = (_by_rows(mesh, rules) for mesh in meshes)
        every = split.num_experts
        self.local = {one.count: stages(every - one.count, one.count) for one in split.local if one is not None}
        with use_mesh(meshes[1], rules):
            self.remote = {one.count: stages(0, one.count) for one in split.remote if one is not None}
        self._zeros: Any = jax.jit(lambda stacks: jax.tree.map(zeros_like, stacks))
        self._most: Any = jax.jit(lambda rounds: jnp.max(jnp.stack(rounds)))
        several = len({device.process_index for mesh in meshes for device in mesh.devices.flat}) > 1
        self._thread = None if several else ThreadPoolExecutor(1, "experts")
        self._jobs: dict[_Key, Future[Any]] = {}
        self._sent: dict[_Key, SentRows] = {}
        self._rounds: list[jax.Array] = []
        self._stacks: Any = None
        self._grads: Any = None
        self._local_stacks: Any = None
        self._local_grads: Any = None

    def check(self, stacks: Any, sent: SentRows) -> None:
        """Trace the programs of experts' devices for described stacks, and what is sent to them."""
        there: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._there), sent)
        with use_mesh(self._meshes[1], self._rules):
            for count, stage in self.remote.items():
                jax.eval_shape(stage.compute, stacks[str(count)], np.int32(0), there)

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call a function in the thread of experts' devices, their mesh in force."""

        def run() -> Any:
            with use_mesh(self._meshes[1], self._rules):
                return self.waited(function(*args))

        if self._thread is None:
            done: Future[Any] = Future()
            done.set_result(run())
            return done
        future = self._thread.submit(run)
        if not self.overlap:
            future.exception()
        return future

    def waited[T](self, result: T) -> T:
        """Return a result; nothing waits for it where programs overlap."""
        return result if self.overlap else jax.block_until_ready(result)

    def begin(self, here: Any, there: Any) -> None:
        """Begin an update with the stacks of experts that each group has."""
        self._local_stacks, self._stacks, self._rounds = here, there, []
        self._jobs, self._sent = {}, {}
        self._local_grads = self._zeros(here)
        self._grads = self.submit(self._zeros, there).result()

    def end(self) -> tuple[Any, Any, jax.Array]:
        """Return the gradients of both groups' stacks, and the most rounds in which rows came to experts."""
        rounds = self.submit(self._most, self._rounds).result()
        here, there = self._local_grads, self._grads
        self._local_stacks = self._stacks = self._local_grads = self._grads = None
        return here, there, rounds

    def forward(self, layer: int, number: int, sent: SentRows) -> None:
        """Send a microbatch to the experts of a layer."""

        def run() -> jax.Array:
            self._sent[layer, number] = there = transfer(sent, self._there)
            share = self._split.remote[layer]
            assert share is not None, "a layer has an expert there"
            stack = self._stacks[str(share.count)]
            y, rounds = self.remote[share.count].compute(stack, np.int32(share.at), there)
            self._rounds.append(rounds)
            return transfer(y, self._here)

        self._jobs[layer, number] = self.submit(run)

    def sum(self, layer: int, number: int) -> jax.Array:
        """Return what the experts made of a microbatch."""
        return self._jobs.pop((layer, number)).result()

    def backward(self, layer: int, number: int, g: jax.Array) -> None:
        """Send the gradient of that."""

        def run() -> Any:
            share = self._split.remote[layer]
            assert share is not None
            key, sent = str(share.count), self._sent.pop((layer, number))
            given = np.int32(share.at), sent, transfer(g, self._there)
            found, self._grads[key] = self.remote[share.count].compute_back(self._stacks[key], *given, self._grads[key])
            return transfer(found, self._here)

        self._jobs[layer, number] = self.submit(run)

    def gradient(self, layer: int, number: int) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of inputs and of weights that have come back."""
        return self._jobs.pop((layer, number)).result()

    def forward_here(self, layer: int, sent: SentRows) -> list[jax.Array]:
        """Return the sum of the layer's experts on attention's devices, if it has any there."""
        share = self._split.local[layer]
        if share is None:
            return []
        stack = self._local_stacks[str(share.count)]
        return [self.waited(self.local[share.count].compute(stack, np.int32(share.at), sent))[0]]

    def backward_here(self, layer: int, sent: SentRows, g: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Return the gradients of inputs and of weights by those experts, if there are any."""
        share = self._split.local[layer]
        if share is None:
            return []
        key, grads = str(share.count), self._local_grads
        back = self.local[share.count].compute_back
        found, grads[key] = self.waited(back(self._local_stacks[key], np.int32(share.at), sent, g, grads[key]))
        return [found]


def _by_rows(mesh: Mesh, rules: AxisRules) -> NamedSharding:
    """Return the sharding by rows alone."""
    with use_mesh(mesh, rules):
        return NamedSharding(mesh, partition("batch") or PartitionSpec())
