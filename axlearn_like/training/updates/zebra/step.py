"""One update of a decoder whose attention and experts are on two groups of devices (HeterMoE, arXiv 2504.03871).

Attention's devices compute layer after layer, all microbatches of one before the next; experts' devices follow in the
same order; then all backwards. So both are busy while a microbatch is left for them (`mesh.cost.zebra`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from axlearn_like.layers.base import Params
from axlearn_like.learner import Learner
from axlearn_like.learner.expert_bias import without_loads
from axlearn_like.learner.grad_norms import grad_squares, norms_of
from axlearn_like.operations.memory import check_state_fits
from axlearn_like.training.losses import Metrics
from axlearn_like.training.step import combined, init_state
from axlearn_like.training.updates.programs import State
from axlearn_like.training.updates.zebra.lane import ExpertLane
from axlearn_like.training.updates.zebra.split import EXPERTS, REST, ExpertSplit
from axlearn_like.training.updates.zebra.stages import Attended, AttentionStages
from axlearn_like.training.updates.zebra.transfer import spread
from mesh.rules import AxisRules, use_mesh

_ATTENTION = "attention"


class ZebraStep:
    """`step(state, batch) -> (state, metrics)`; the state, which is donated, has a part for each group.

    {"step": int32 [], "attention": {"params", "opt_state"}, "experts": {"params", "opt_state"}}: see `ExpertSplit`.
    The mesh in force is that of attention's devices.
    """

    def __init__(
        self,
        attention: AttentionStages,
        lane: ExpertLane,
        learner: Learner,
        split: ExpertSplit,
        meshes: tuple[Mesh, Mesh],
        rules: AxisRules,
    ):
        """Take the programs of each group, and what divides the state between them."""
        self.attention, self.lane, self._learner = attention, lane, learner
        self.meshes, self._split, self._rules = meshes, split, rules
        self._update: Any = jax.jit(self._updated, donate_argnums=0)
        self._squares: Any = jax.jit(lambda grads: grad_squares(without_loads(grads)))
        self._norms: Any = jax.jit(norms_together)
        self._length: Any = jax.jit(lambda parts: jnp.sqrt(sum(part * part for part in parts)))
        self._metrics: Any = jax.jit(_metrics)

    # ---- the state's usual form, which is that of checkpoints

    def parted(self, state: State) -> State:
        """Return the state that steps take, of one in the usual form."""
        parts = zip(self._split.parted(state["params"]), self._split.parted(state["opt_state"]), strict=True)
        attention, experts = ({"params": params, "opt_state": opt} for params, opt in parts)
        return {"step": state["step"], _ATTENTION: attention, EXPERTS: experts}

    def whole(self, state: State) -> State:
        """Return the state in the usual form; experts are on experts' devices."""
        parts = state[_ATTENTION], state[EXPERTS]
        whole = {name: self._split.whole(*(part[name] for part in parts)) for name in ("params", "opt_state")}
        return {"step": state["step"], **whole}

    def gathered(self, state: State) -> State:
        """Return the usual form, all of it on attention's devices, which need the memory: for evaluators."""

        def here(x: jax.Array) -> jax.Array:
            where: Any = x.sharding
            elsewhere = where.device_set != set(self.meshes[0].devices.flat)
            return jax.device_put(x, NamedSharding(self.meshes[0], where.spec)) if elsewhere else x

        return jax.tree.map(here, self.whole(state))

    def begin(self, params: Params) -> State:
        """Return the state before the first update, in the usual form, of such parameters."""
        init: Any = jax.jit(self._begun)
        attention, experts = self._split.parted(params)
        with use_mesh(self.meshes[1], self._rules):
            second = init(experts)
        first = init(attention)
        return {**first, "params": params, "opt_state": self._split.whole(first["opt_state"], second["opt_state"])}

    def check(self, state: State, batch: Any) -> None:
        """Trace the programs for a described state in the usual form (UserError: it does not fit, or they do not)."""
        parted, stages = self.parted(state), self.attention
        for name, mesh in zip((_ATTENTION, EXPERTS), self.meshes, strict=True):
            check_state_fits(parted[name], mesh)
        rest, experts = parted[_ATTENTION]["params"][REST], parted[EXPERTS]["params"][EXPERTS]
        one = jax.eval_shape(stages.slices, batch)[0]
        x = jax.eval_shape(stages.embed, rest, one)
        done = jax.eval_shape(stages.attend, rest, np.int32(0), (x,), one)
        self.lane.check(experts, done.sent)
        aux = [done.aux] * len(self._split.moved)
        jax.eval_shape(stages.finish, rest, (x,), aux, one, jax.eval_shape(stages.zeros, rest))

    # ---- the update

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Return the state after the update, and metrics."""
        lane, attention, experts = self.lane, state[_ATTENTION], state[EXPERTS]
        (here, there), found = self.gradients(state, batch)
        squares = [self._squares(here), spread(lane.submit(self._squares, there).result(), self.meshes[0])]
        norms = self._norms(squares)
        done = lane.submit(self._update, experts, there, spread(norms, self.meshes[1]))
        attention, metrics = self._update(attention, here, norms)
        experts, others = done.result()
        lengths = [metrics["update_norm"], spread(others["update_norm"], self.meshes[0])]
        metrics = {**found, **metrics, "update_norm": self._length(lengths)}
        return {"step": state["step"] + 1, _ATTENTION: attention, EXPERTS: experts}, metrics

    def gradients(self, state: State, batch: Any) -> tuple[tuple[Any, Any], Metrics]:
        """Return the gradients of both parts, float32, like their parameters, and the metrics of the loss."""
        stages, lane, params = self.attention, self.lane, state[_ATTENTION]["params"]
        rest, grads, batches = params[REST], stages.zeros(params[REST]), stages.slices(batch)
        lane.begin(params[EXPERTS], state[EXPERTS]["params"][EXPERTS])
        kept, parts = self._forward(rest, batches)
        ends: list[_End] = []
        for number, one in enumerate(batches):
            aux = [layer[number].aux for layer in kept]
            *end, grads = lane.waited(stages.finish(rest, parts[number], aux, one, grads))
            ends.append(_End(*end))
            lane.backward(len(kept) - 1, number, ends[number].of_x)
        of_x = [end.of_x for end in ends]
        for layer in reversed(range(len(kept))):
            local = [lane.backward_here(layer, one.sent, g) for one, g in zip(kept[layer], of_x, strict=True)]
            for number, one in enumerate(batches):
                of_sent = [*local[number], lane.gradient(layer, number)]
                given = kept[layer][number].x, one, of_x[number], (ends[number].of_losses, of_sent)
                of_x[number], grads = lane.waited(stages.attend_back(rest, np.int32(layer), *given, grads))
                if layer:
                    lane.backward(layer - 1, number, of_x[number])
            kept.pop()
        for one, g in zip(batches, of_x, strict=True):
            grads = lane.waited(stages.embed_back(rest, one, g, grads))
        here, there, rounds = lane.end()
        metrics = self._metrics([end.metrics for end in ends], spread(rounds, self.meshes[0]))
        return ({REST: grads, EXPERTS: here}, {EXPERTS: there}), metrics

    def _forward(self, rest: Any, batches: list[Any]) -> tuple[list[list[Attended]], list[tuple[jax.Array, ...]]]:
        """Return what each layer keeps of each microbatch, and the parts of the last one's output."""
        stages, lane = self.attention, self.lane
        parts: list[tuple[jax.Array, ...]] = [(lane.waited(stages.embed(rest, one)),) for one in batches]
        kept: list[list[Attended]] = []
        for layer in range(len(self._split.moved)):
            done: list[Attended] = []
            for number, one in enumerate(batches):
                done.append(lane.waited(stages.attend(rest, np.int32(layer), parts[number], one)))
                lane.forward(layer, number, done[number].sent)
            local = [lane.forward_here(layer, one.sent) for one in done]
            parts = [
                (one.residual, *own, lane.sum(layer, j)) for j, (one, own) in enumerate(zip(done, local, strict=True))
            ]
            kept.append(done)
        return kept, parts

    def _begun(self, params: Any) -> State:
        state = init_state(params, self._learner)
        return {name: state[name] for name in ("step", "opt_state")}

    def _updated(self, part: Any, grads: Any, norms: Metrics) -> tuple[Any, Metrics]:
        params, opt_state, metrics = self._learner.update(grads, part["opt_state"], part["params"], norms=norms)
        return {"params": params, "opt_state": opt_state}, metrics


class _End(NamedTuple):
    """The result of a microbatch's loss."""

    metrics: Metrics
    of_x: jax.Array  # gradient of the last layer's output
    of_losses: Any  # gradients of the layers' own losses, [layers]


def norms_together(parts: list[Metrics]) -> Metrics:
    """Return the norms of what has these sums of squares together."""
    names = dict.fromkeys(name for part in parts for name in sorted(part))
    return norms_of({name: sum((part[name] for part in parts if name in part), jnp.zeros(())) for name in names})


def _metrics(found: list[Metrics], rounds: jax.Array) -> Metrics:
    every = {name: combined(name, jnp.stack([one[name] for one in found])) for name in found[0]}
    return {**every, "expert_rounds_max": jnp.maximum(every["expert_rounds_max"], rounds)}
