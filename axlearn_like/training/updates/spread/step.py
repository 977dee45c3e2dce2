"""The update of an elastic run whose experts are spread over its members (Lazarus, arXiv 2407.04656).

A member computes all but the experts for its own parts of a batch, layer by layer; rows go to the members that have
their experts, and back. Parts, calls and the order of sums depend on the batch alone: no bit depends on how many
members there are, or on who has which expert.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.elastic.experts import ExpertMap, Key
from axlearn_like.elastic.member import Changed, Member, OfferedState
from axlearn_like.elastic.membership import MemberEntry, Membership
from axlearn_like.elastic.parts import fold, nodes, share
from axlearn_like.elastic.update import MemberStep, heard
from axlearn_like.elastic.update import place as placed_like
from axlearn_like.training.updates.programs import State
from axlearn_like.training.updates.spread.calls import ExpertCalls, PartRows, share_gradients
from axlearn_like.training.updates.spread.cut import expert_of, flat, rest_of, shaped, whole_of
from axlearn_like.training.updates.spread.placed import ExpertPlaces
from axlearn_like.training.updates.spread.programs import SpreadPrograms
from axlearn_like.training.updates.zebra.split import matrices_of
from axlearn_like.training.updates.zebra.stages import Attended
from mesh.errors import UserError

_ALONE = Membership(0, (MemberEntry(0, ("", 0), 0),))


class _Pending(NamedTuple):
    """An update that others may have completed while this member has not."""

    used: ExpertMap
    experts: dict[Key, Any]
    grads: dict[Key, Any]
    rows: np.ndarray  # int64 [layers, experts]


class SpreadStep(MemberStep):
    """`step(state, batch)` of {"step", "rest": {"params", "opt_state"}, "experts": {(layer, expert): the same}}.

    The experts of a state are those that this member has; a state before the first update has all, in host memory.
    """

    def __init__(
        self, programs: SpreadPrograms, places: ExpertPlaces, parts: int, member: Member | None, described: State
    ):
        """Take what the update is made of.

        Args:
            programs: the programs of a member.
            places: the places of experts.
            parts: parts of a batch.
            member: this process among the others; None: it is alone.
            described: state in the usual form, on this member's devices.
        """
        super().__init__(parts, member)
        self._programs, self._places = programs, places
        parted = {name: described[name] for name in ("params", "opt_state")}
        self._rest: Any = {"step": described["step"], "rest": rest_of(parted)}
        self._expert: Any = _with_shardings(jax.eval_shape(lambda x: expert_of(x, (0, 0)), parted), described["step"])
        self._settled = False  # True once this member has experts
        self._pending: _Pending | None = None

    def parted(self, state: State) -> State:
        """Return the state that steps take, of one in the usual form, in host memory."""
        if "params" not in state:
            return state
        tree = jax.tree.map(np.asarray, {name: state[name] for name in ("params", "opt_state")})
        first = {"step": np.asarray(state["step"]), "rest": rest_of(tree)}
        rest = placed_like(jax.tree.leaves(first), self._rest)
        self._settled = True
        return {**rest, "experts": {key: expert_of(tree, key) for key in np.ndindex(*self._programs.shape)}}

    def gathered(self, state: State) -> State | None:
        """Return the usual form in host memory, of which others send parts; None: this member does not write it."""
        experts, member = dict(state["experts"]), self._member
        if member is not None:
            view, step = member.view, int(state["step"])
            if member.changed:
                return None
            have, me = self._places.have(view), view.position(member.index)
            own = [key for key, places in have.items() if places[:1] == [me]]
            try:
                if me:
                    arrays = [np.asarray(leaf) for key in own for leaf in jax.tree.leaves(experts[key])]
                    member.push(view, step, "saved experts", view.members[0], ({"keys": own}, arrays))
                    return None
                for place in view.members[1:]:
                    header, arrays = member.take(view, step, "saved experts", place)
                    each = len(arrays) // max(1, len(header["keys"]))
                    for number, (layer, expert) in enumerate(header["keys"]):
                        some = arrays[number * each : (number + 1) * each]
                        experts[layer, expert] = jax.tree.unflatten(jax.tree.structure(self._expert), some)
            except Changed:
                return None
        rest, experts = jax.tree.map(np.asarray, (state["rest"], experts))
        whole = whole_of(rest, experts, self._programs.shape)
        return {"step": np.asarray(state["step"]), **whole}

    def prepare(self, batch: Mapping[str, Any]) -> None:
        """Compile all that an update runs; the batch is described."""
        rows = {name: np.zeros(x.shape, x.dtype) for name, x in batch.items()}
        self._programs.rehearse(self._rest["rest"], self._expert, self._part_of(rows, 0))

    def __call__(self, state: State, batch: Mapping[str, np.ndarray]) -> tuple[State, Any]:
        """Return the state after the update, and metrics; the state is donated."""
        member, done = self._member, int(state["step"])
        while True:
            try:
                view = _ALONE
                if member is not None:
                    view = member.agree(done if self._settled else None, lambda: self.offer(state))
                    if view.newest is None and not self._settled:
                        raise UserError(f"the members that had the state of step {done} are lost")
                    if view.newest is not None and view.newest > done:
                        return self._follow(member.fetch(view))
                used, experts = self._places.settled(view, done + 1, state["experts"], self._on_devices)
                vector, metrics = self._sums(view, used, state, experts, batch)
                break
            except Changed:
                continue
        *values, rows, squares = metrics
        grads = shaped(vector, self._rest["rest"]["params"])
        norms = self._programs.norms(grads, squares)
        rest, learned = self._programs.updated(state["rest"], grads, norms)
        found = {**{name: jnp.asarray(value) for name, value in zip(self._names, values, strict=True)}, **learned}
        return self._end({"step": state["step"] + 1, "rest": rest}, norms, found, rows)

    def offer(self, state: State) -> OfferedState:
        """Return all but the experts for others that lack it, and the places of these."""
        arrays = [np.array(leaf) for leaf in jax.tree.leaves({name: state[name] for name in ("step", "rest")})]
        told = {"extras": self.extras, "metrics": self._told(), "places": self._places.to_json()}
        return OfferedState(arrays, told)

    def received(self, sent: OfferedState, abstract: Mapping[str, Any]) -> State:
        """Return the state that others have sent to one that has none; its experts come with the next update."""
        self._places.restore(sent.extras["places"])
        self._metrics = heard(sent.extras["metrics"])
        return {**placed_like(sent.arrays, self._rest), "experts": {}}

    def _follow(self, sent: OfferedState) -> tuple[State, Any]:
        """Return the state and metrics of an update that others have made and this member has not.

        It has the gradients of its experts: no member can be that far before all have theirs.
        """
        pending = self._pending
        if pending is None:  # a newcomer of that update
            return self.received(sent, {}), self._metrics
        metrics = heard(sent.extras["metrics"])
        norms = {name: value for name, value in metrics.items() if name.startswith("grad_norm")}
        after = self._end(placed_like(sent.arrays, self._rest), norms, metrics, pending.rows)
        self._places.restore(sent.extras["places"])
        return after

    def _end(self, after: State, norms: Any, metrics: Any, rows: np.ndarray) -> tuple[State, Any]:
        """Return the state and metrics of an update, once its experts are updated too."""
        pending = self._pending
        assert pending is not None, "sums are there"
        experts = {
            key: self._programs.updated(one, pending.grads[key], norms)[0] for key, one in pending.experts.items()
        }
        self._places.completed(pending.used, rows)
        self._pending, self._metrics, self._settled = None, metrics, True
        if self._member is not None:
            self._member.completed(int(after["step"]))
        return {**after, "experts": experts}, metrics

    def _on_devices(self, expert: Any) -> Any:
        """Return the state of an expert, or of its arrays, on this member's devices."""
        leaves = jax.tree.leaves(expert)
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            return expert
        return placed_like([np.asarray(leaf) for leaf in leaves], self._expert)

    def _sums(
        self, view: Membership, used: ExpertMap, state: State, experts: dict[Key, Any], batch: Any
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the sums over all parts: gradients of the rest, metrics, rows and squares of experts."""
        member, step, count = self._member, int(state["step"]) + 1, len(view.members)
        me = 0 if member is None else view.position(member.index)

        def exchange(kind: str, out: Any) -> Any:
            return out if member is None else member.exchange(view, step, kind, out)

        params = {key: matrices_of(one["params"]) for key, one in experts.items()}
        calls = ExpertCalls(self._programs.expert, exchange, used.calls(self._parts), params, (me, count))
        mine = share(self._parts, me, count)
        parts = self._gradients(state["rest"]["params"], {part: self._part_of(batch, part) for part in mine}, calls)
        totals = share_gradients(exchange, calls.grads, used.holders(), (me, count))
        like = self._expert["params"]
        grads = {key: _shaped_or_zeros(total, like) for key, total in totals.items()}
        squares = np.zeros(self._programs.shape, np.float32)
        for key, places in used.holders().items():
            if places[0] == me:
                squares[key] = np.asarray(self._programs.square(grads[key]))
        have: dict[Any, Any] = {}
        for node in nodes(self._parts, mine):
            have[node] = fold(node, lambda n: parts[n[0]] if n[1] - n[0] == 1 else None, self._add)
        zero = np.zeros_like(calls.counts), np.zeros_like(squares)
        own = {node: zero if number else (calls.counts, squares) for number, node in enumerate(have)}
        have = {node: (vector, [*values, *own[node]]) for node, (vector, values) in have.items()}
        self._pending = _Pending(used, experts, grads, calls.counts)
        if member is None:
            return have[0, self._parts]
        self._settled = self._settled or self._places.map is not None
        vector, metrics = member.sum(view, step, have, self._add_all)
        self._pending = self._pending._replace(rows=metrics[-2])
        return vector, metrics

    def _gradients(
        self, rest: Any, batches: Mapping[int, Any], calls: ExpertCalls
    ) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
        """Return the gradients of the rest by each part as one float32 vector, and its metrics."""
        stages, layers = self._programs.attention, self._programs.shape[0]
        inputs: dict[int, Any] = {part: (stages.embed(rest, batch),) for part, batch in batches.items()}
        kept: list[tuple[dict[int, Attended], dict[int, PartRows]]] = []
        for layer in range(layers):
            done = {p: stages.attend(rest, np.int32(layer), inputs[p], batch) for p, batch in batches.items()}
            sent = {p: PartRows(*map(np.asarray, one.sent)) for p, one in done.items()}
            sums = calls.forward(layer, sent)
            inputs = {p: (one.residual, jax.device_put(sums[p], one.residual.sharding)) for p, one in done.items()}
            kept.append((done, sent))
        ends: dict[int, Any] = {}
        of_x: dict[int, jax.Array] = {}
        grads: dict[int, Any] = {}
        for p, batch in batches.items():
            aux = [done[p].aux for done, _ in kept]
            found = stages.finish(rest, inputs[p], aux, batch, stages.zeros(rest))
            ends[p], of_x[p], grads[p] = (found[0], found[2]), found[1], found[3]
        for layer in reversed(range(layers)):
            done, sent = kept.pop()
            back = calls.backward(layer, {p: np.asarray(g) for p, g in of_x.items()}, sent)
            for p, batch in batches.items():
                one = done[p]
                of_sent = [tuple(jax.device_put(g, a.sharding) for g, a in zip(back[p], one.sent[:2], strict=True))]
                given = one.x, batch, of_x[p], (ends[p][1], of_sent)
                of_x[p], grads[p] = stages.attend_back(rest, np.int32(layer), *given, grads[p])
        self._names = sorted(next(iter(ends.values()))[0])
        found: dict[int, Any] = {}
        for p, batch in batches.items():
            vector = flat(stages.embed_back(rest, batch, of_x[p], grads.pop(p)))
            found[p] = vector, [np.asarray(ends[p][0][name]) for name in self._names]
        return found

    def _add_all(self, one: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
        """Add metrics, and rows and squares of experts."""
        return [*self._add_metrics(one[:-2], other[:-2]), one[-2] + other[-2], one[-1] + other[-1]]


def _shaped_or_zeros(total: np.ndarray | None, like: Any) -> Any:
    if total is None:
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), like)
    return shaped(total, like)


def _with_shardings(tree: Any, like: Any) -> Any:
    """Return a described tree with the sharding of a scalar."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding), tree)
