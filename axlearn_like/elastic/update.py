"""The update of an elastic run: this member's parts of the batch, the sum with the others, the learner's update."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, Protocol, override

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.elastic.member import Changed, Member, OfferedState
from axlearn_like.elastic.parts import fold, nodes, share
from mesh import shard_batch

State = dict[str, Any]


class Summed(Protocol):
    """The two programs of an update (`training.step.AccumulatedStep`)."""

    accumulate: Any  # function: (sums, {"held", "params", "rows"}) -> (sums with those of these rows, {})
    update: Any  # function: (state, sums) -> (state, metrics)
    trained: Callable[[State], Any]  # function: state -> parameters that gradients are of

    def empty(self, params: Any, rows: Any) -> Any:
        """Return the sums before the first rows; pure."""
        ...

    def parted(self, state: State) -> dict[str, Any]:
        """Return the parameters that gradients are of, and the held ones."""
        ...


class MemberStep(abc.ABC):
    """A step that all members of a run make together, by parts of a batch.

    Attributes:
        extras: parts of the newest state beside its arrays.
    """

    def __init__(self, parts: int, member: Member | None):
        """Take the parts of a batch, and this process among the others; None: it is alone."""
        self._parts, self._member = parts, member
        self.extras: dict[str, Any] = {}
        self._metrics: Mapping[str, Any] = {}  # metrics of the last update
        self._names: list[str] = []  # names of the metrics

    @abc.abstractmethod
    def received(self, sent: OfferedState, abstract: Mapping[str, Any]) -> State:
        """Return the state that others have sent to one that has none."""

    def _told(self) -> dict[str, Any]:
        """Return the metrics of the last update, JSON-able."""
        metrics = {name: np.asarray(value) for name, value in self._metrics.items()}
        return {name: [value.dtype.name, value.tolist()] for name, value in metrics.items()}

    def _part_of(self, batch: Mapping[str, np.ndarray], part: int) -> dict[str, Any]:
        """Return the rows of a part, on this member's devices."""

        def rows(x: np.ndarray) -> np.ndarray:
            each = x.shape[0] // self._parts
            return x[part * each : (part + 1) * each]

        return shard_batch({name: rows(x) for name, x in batch.items()})

    def _add_metrics(self, one: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
        pairs = zip(self._names, one, other, strict=True)
        return [np.asarray(np.maximum(a, b) if name.endswith("_max") else np.add(a, b)) for name, a, b in pairs]

    def _add(self, one: tuple[np.ndarray, Any], other: tuple[np.ndarray, Any]) -> tuple[np.ndarray, Any]:
        return one[0] + other[0], self._add_metrics(one[1], other[1])


def heard(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that another member has told."""
    return {name: jnp.asarray(value, jnp.dtype(kind)) for name, (kind, value) in told.items()}


class ElasticStep(MemberStep):
    """`step(state, batch)` that all members of a run make together; the batch is whole, in host memory.

    Every part of a batch goes through one program, of which only the rows differ, and sums follow a fixed tree over the
    parts: no bit depends on how many members there are, and no other program is needed when that changes.
    """

    def __init__(self, summed: Summed, parts: int, member: Member | None):
        """Take what the update is made of.

        Args:
            summed: the gradients of some rows, and the update by their sum; its programs are compiled when first used.
            parts: parts of a batch.
            member: this process among the others; None: it is alone.
        """
        super().__init__(parts, member)
        self.summed = summed
        self._empty: Any = None
        self._shape: Any = None  # tree of the sums, described

    def prepare(self, state: State, batch: Mapping[str, Any]) -> None:
        """Compile all that an update runs, by an update aside that is thrown away; state and batch are described."""
        shardings = jax.tree.map(lambda x: x.sharding, state)
        make = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state), out_shardings=shardings)
        begun, rows = make(), {name: np.zeros(x.shape, x.dtype) for name, x in batch.items()}
        vector, metrics = self._part(begun, rows, 0)
        jax.block_until_ready(self.summed.update(begun, self._sums(vector, metrics)))

    def __call__(self, state: State, batch: Mapping[str, np.ndarray]) -> tuple[State, Any]:
        """Return the state after the update, and metrics; the state is donated."""
        member, done = self._member, int(state["step"])
        while True:
            if member is None:
                vector, metrics = self._gradients(state, batch, range(self._parts))[0, self._parts]
                break
            view = member.agree(done, lambda: self.offer(state))
            try:
                if view.newest is not None and view.newest > done:
                    return self._follow(state, member.fetch(view))
                mine = share(self._parts, view.position(member.index), len(view.members))
                have = self._gradients(state, batch, mine)
                vector, metrics = member.sum(view, done + 1, have, self._add_metrics)
                break
            except Changed:
                continue
        state, metrics = self.summed.update(state, self._sums(vector, metrics))
        self._metrics = metrics
        if member is not None:
            member.completed(done + 1)
        return state, metrics

    def offer(self, state: State) -> OfferedState:
        """Return the state for others that lack it."""
        arrays = [np.array(leaf) for leaf in jax.tree.leaves(state)]
        return OfferedState(arrays, {"extras": self.extras, "metrics": self._told()})

    @override
    def received(self, sent: OfferedState, abstract: Mapping[str, Any]) -> State:
        return place(sent.arrays, dict(abstract))

    def _follow(self, state: State, sent: OfferedState) -> tuple[State, Any]:
        """Return the state and metrics of an update that others have made and this member has not."""
        self._metrics = heard(sent.extras["metrics"])
        return place(sent.arrays, state), self._metrics

    def _gradients(self, state: State, batch: Mapping[str, np.ndarray], mine: range) -> dict[Any, Any]:
        """Return the sums of the largest nodes among some parts. Changed: they are to be shared again."""

        def leaf(node: tuple[int, int]) -> tuple[np.ndarray, Any] | None:
            if self._member is not None and self._member.changed:
                raise Changed
            return self._part(state, batch, node[0]) if node[1] - node[0] == 1 else None

        return {node: fold(node, leaf, self._add) for node in nodes(self._parts, mine)}

    def _part(self, state: State, batch: Mapping[str, np.ndarray], part: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the gradients of a part as one float32 vector, and its metrics."""
        rows = self._part_of(batch, part)
        params = self.summed.trained(state)
        if self._empty is None:
            described = jax.eval_shape(lambda: rows)
            self._empty = jax.jit(lambda params: self.summed.empty(params, described))
            self._shape = self._empty(params)
            self._names = sorted(self._shape["metrics"])
        sums, _ = self.summed.accumulate(self._empty(params), {**self.summed.parted(state), "rows": rows})
        grads = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(sums["grads"])]
        return np.concatenate(grads), [np.asarray(sums["metrics"][name]) for name in self._names]

    def _sums(self, vector: np.ndarray, metrics: list[np.ndarray]) -> Any:
        """Return the sums of all parts, as the update takes them."""
        leaves, at = [], 0
        for leaf in jax.tree.leaves(self._shape["grads"]):
            leaves.append(vector[at : at + leaf.size].reshape(leaf.shape))
            at += leaf.size
        grads = jax.tree.unflatten(jax.tree.structure(self._shape["grads"]), leaves)
        sums = {"grads": grads, "metrics": dict(zip(self._names, metrics, strict=True))}
        return place(jax.tree.leaves(sums), self._shape)


def place(arrays: list[np.ndarray], like: Any) -> Any:
    """Return a tree of arrays, copied to the devices of a tree that is alike."""
    leaves, structure = jax.tree.flatten(like)
    shardings = [leaf.sharding for leaf in leaves]
    return jax.tree.unflatten(structure, jax.device_put(arrays, shardings, may_alias=False))
