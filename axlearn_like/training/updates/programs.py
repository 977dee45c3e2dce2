"""Programs of train steps: each runs alone, or in a loop over several trainers that share what it only reads."""

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.training.losses import Metrics

State = dict[str, Any]  # {"step": int32[], "params": nested dict, "opt_state": tree}, and what else a learner keeps
Step = Callable[[State, Any], tuple[State, Metrics]]


class StepProgram:
    """A jitted `function(changed, given) -> (changed, found)`, which donates `changed`.

    `given["held"]` is what several trainers may share; it has no other arrays that they do.
    """

    def __init__(self, function: Callable[[Any, Any], tuple[Any, Any]], **options: Any):
        """Take a pure function and options of `jax.jit`."""
        self._function, self._options = function, options
        self.jitted: Any = jax.jit(function, donate_argnums=0, **options)
        self._loops: dict[int, Any] = {}

    def __call__(self, changed: Any, given: Any) -> tuple[Any, Any]:
        """Run the program."""
        return self.jitted(changed, given)

    def trace(self, changed: Any, given: Any) -> Any:
        """Return its trace."""
        return self.jitted.trace(changed, given)

    def lower(self, changed: Any, given: Any) -> Any:
        """Return it, lowered."""
        return self.jitted.lower(changed, given)

    def of_several(self, width: int) -> Any:
        """Return jitted `([changed, ...], {"held", "each": [given without held, ...], "count"})`, a list of results.

        Both lists have `width` entries, 2 or more; the first `count` are computed, one after another in a loop. Its
        body is the same whatever width and count are, and so are the bits of each result. What does not change from
        turn to turn, such as a layout of the frozen matrices, is done once. All `changed` are donated, so that beside
        them there is one stack of `width` while it runs.
        """
        if width not in self._loops:
            self._loops[width] = jax.jit(self._in_loop, donate_argnums=0, **self._options)
        return self._loops[width]

    @property
    def loops(self) -> bool:
        """True if it can run in a loop: not where some of what it changes is kept on the host."""
        return "out_shardings" not in self._options

    def _in_loop(self, changed: Sequence[Any], given: Any) -> list[Any]:
        held, inputs = given["held"], _stacked(given["each"])

        def turn(number: jax.Array, results: Any) -> Any:
            # Barriers: fused with its reads and writes, the body might be computed otherwise.
            own = jax.lax.optimization_barrier((_entry(results[0], number), _entry(inputs, number)))
            new = jax.lax.optimization_barrier(self._function(own[0], {"held": held, **own[1]}))
            put = lambda every, one: jax.lax.dynamic_update_index_in_dim(every, one, number, 0)  # noqa: E731
            return jax.tree.map(put, results, new)

        states = _stacked(changed)
        found = jax.eval_shape(self._function, changed[0], {"held": held, **given["each"][0]})[1]
        empty = jax.tree.map(lambda one: jnp.zeros((len(changed), *one.shape), one.dtype), found)
        results = jax.lax.fori_loop(0, given["count"], turn, (states, empty))
        return [jax.tree.map(lambda leaf, at=at: leaf[at], results) for at in range(len(changed))]


class ProgramCall(NamedTuple):
    """A call that an update is waiting for: its result is sent back.

    Attributes:
        program: a `StepProgram`, or what guards one.
        changed: its first argument.
        given: its second argument.
    """

    program: Any
    changed: Any
    given: Any

    def run(self) -> Any:
        """Return the result."""
        return self.program(self.changed, self.given)

    @property
    def shape(self) -> Hashable:
        """Key of what calls that run together have in common: shapes, and the arrays that they share."""
        own = {name: part for name, part in self.given.items() if name != "held"}
        leaves, structure = jax.tree.flatten((self.changed, own))
        shared = tuple(id(leaf) for leaf in jax.tree.leaves(self.given["held"]))
        return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves), shared


Calls = Generator[ProgramCall, Any, tuple[State, Metrics]]  # an update, call by call


def run_calls(calls: Calls) -> tuple[State, Metrics]:
    """Run an update alone, and return its result."""
    result = None
    while True:
        try:
            call = calls.send(result)
        except StopIteration as end:
            return end.value
        result = call.run()


def run_together(calls: Sequence[ProgramCall], program: Any, width: int) -> list[Any]:
    """Return the results of calls of one `shape`, by `of_several(width)` of their program."""
    missing = width - len(calls)
    each = [{name: part for name, part in call.given.items() if name != "held"} for call in calls]
    given = {"held": calls[0].given["held"], "each": [*each, *each[:1] * missing], "count": jnp.int32(len(calls))}
    empty = [jax.tree.map(_zeros, calls[0].changed) for _ in range(missing)]  # donated: none can be given twice
    return program([*(call.changed for call in calls), *empty], given)[: len(calls)]


def _zeros(leaf: jax.Array) -> jax.Array:
    return jnp.zeros_like(leaf, device=leaf.sharding if leaf.committed else None)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _entry(tree: Any, number: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False), tree)
