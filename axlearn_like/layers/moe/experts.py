"""Experts: many gated feed-forward networks, each token through the few that a router chose for it.

Dropless: rows are sorted by expert and go through grouped matrix products, so no expert has a fixed capacity. Over a
mesh, experts are sharded by the axis `expert`, their width by `tensor`, and their inputs by `fsdp`. Tokens are sent to
the devices of their experts (`all_to_all.py`), or of replicas of them (`replicas.py`), and back. Where all devices of
that axis have the same tokens, as in a rollout engine, each computes its own experts' part, and parts are added up.
"""

from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.kernels.exact.scope import exact_kernels, refuse_exact
from axlearn_like.kernels.grouped_matmul import grouped_product, product_in_stack
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.moe import all_to_all
from axlearn_like.layers.moe.dispatch import Order, combine, counts, order_by, repeat_sorted
from axlearn_like.layers.moe.replicas import Placement, current_placement, rows_by_slot, to_slots
from axlearn_like.layers.moe.rounds import in_rounds
from axlearn_like.layers.moe.weighted_sum import weighted_results
from axlearn_like.layers.moe.weights import ExpertWeights, each_weight, gathered_weight, partitions_in_stack
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from axlearn_like.remat import checkpoint_name
from mesh.cost.expected import filled
from mesh.errors import UserError
from mesh.rules import axis_sizes, manual_axis_sizes, partition
from mesh.sharding import vary, varying

_ROWS = 8  # capacities are multiples of this
_CAPACITY_FACTOR = 1.25  # MaxText's and GShard's, where rows above it are dropped


class Experts(Layer):
    """down_e(silu(gate_e(x)) * up_e(x)) for `num_experts` e, without biases."""

    fixed_order = True
    grouped = ("gate_edf", "up_edf", "down_efd")

    class Config(ConfigBase["Experts"]):
        dim: int = REQUIRED
        num_experts: int = REQUIRED
        hidden: int = REQUIRED  # width of one expert
        # Rows that a device takes at a time if experts are on several, as a multiple of the mean; more rows take more
        # rounds: nothing is dropped. None: 1.25.
        capacity_factor: float | None = None

        @override
        def check_fields(self) -> None:
            factor = self.capacity_factor
            self.require("capacity_factor", factor is None or factor > 0, "above 0, or None")

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        devices = _expert_axis_size()
        if cfg.num_experts % devices:
            raise UserError(
                f"Experts.Config.num_experts: {cfg.num_experts} experts do not divide evenly over the mesh "
                f"(expert {devices})"
            )
        wide, narrow = fan_in_init(cfg.dim), fan_in_init(cfg.hidden)
        inner, outer = (cfg.num_experts, cfg.dim, cfg.hidden), (cfg.num_experts, cfg.hidden, cfg.dim)
        self.gate_edf = param(rngs, inner, ("experts", "embed", "hidden"), wide)
        self.up_edf = param(rngs, inner, ("experts", "embed", "hidden"), wide)
        self.down_efd = param(rngs, outer, ("experts", "hidden", "embed"), narrow)
        self._num_experts, self._capacity_factor = cfg.num_experts, cfg.capacity_factor or _CAPACITY_FACTOR

    def __call__(self, x_btd: jax.Array, experts_btk: jax.Array, weights_btk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weighted sum of each token's experts.

        Args:
            x_btd: [batch, length, dim].
            experts_btk: int32 [batch, length, top_k], no expert twice for a token; num_experts: none, for padding.
            weights_btk: float32 [batch, length, top_k].

        Returns:
            [batch, length, dim], and in how many rounds rows were sent to their experts, a float32 scalar.
        """
        weights = each_weight(lambda weight: weight.astype(x_btd.dtype), self._weights())
        if (kernels := exact_kernels()) is not None:
            from axlearn_like.layers.moe.fixed_order import sum_of_experts  # Pallas: slow to import

            arrays = (x_btd, experts_btk, weights_btk, weights[:3], self._hidden)
            return sum_of_experts(*arrays, interpret=kernels.interpret), jnp.ones(())
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return self._local(x_btd, experts_btk, weights_btk, weights)
        # Inside a pipeline, for example, an axis may be manual already.
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in kinds if kind != AxisType.Manual)
        was = jax.typeof(x_btd).sharding.spec
        # Tokens may be sharded by length, but not over `tensor`, which shards the experts' width here.
        by_rows, by_tokens = partition("batch", None, None), partition("batch", "length", None)
        rows = by_tokens if by_tokens is not None and was[1] == by_tokens[1] else by_rows
        placement = self._placement() if axis_sizes("experts").get("expert", 1) > 1 else None
        table = None if placement is None else PartitionSpec()
        specs = (rows, rows, rows, partitions_in_stack(weights, self._partitions()), table)
        run = jax.shard_map(self._on_device, in_specs=specs, out_specs=(rows, PartitionSpec()), axis_names=set(axes))
        y_btd, rounds = run(*jax.sharding.reshard((x_btd, experts_btk, weights_btk, weights, placement), specs))
        return jax.sharding.reshard(y_btd, was), rounds

    def _placement(self) -> Placement | None:
        return current_placement()

    def _brought(self, shards: ExpertWeights, placement: Placement) -> ExpertWeights:
        """Return the weights of this device's slots."""
        return each_weight(lambda shard: to_slots(shard, placement.experts, "expert"), shards)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_edf[...], self.up_edf[...], self.down_efd[...])

    def _partitions(self) -> ExpertWeights:
        inner, outer = partition("experts", "embed", "hidden"), partition("experts", "hidden", "embed")
        return ExpertWeights(inner, inner, outer)

    def _on_device(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        shards: ExpertWeights,
        placement: Placement | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the result for one device's tokens, with its shard of the weights."""
        axes = {"gate": 1, "up": 1, "down": 2}
        if placement is not None:
            shards = self._brought(shards, placement)
        matrices = shards._replace(
            **{name: gathered_weight(getattr(shards, name), axis) for name, axis in axes.items()}
        )
        # Declared here, sums over devices happen once per gradient instead of wherever two kinds of arrays meet.
        shared = _expert_axis_size() > 1 and "expert" not in varying(x)  # all devices with experts have these tokens
        everywhere = frozenset[str]().union(*map(varying, jax.tree.leaves((x, matrices[:3]))))
        x, experts, weights, matrices = jax.tree.map(lambda a: vary(a, everywhere), (x, experts, weights, matrices))
        y, rounds = self._local(x, experts, weights, matrices, shared=shared, placement=placement)
        summed = tuple(manual_axis_sizes("hidden"))
        if shared:  # one sum over the axes that have parts of it
            summed = tuple(name for name in (*summed, "expert") if name in varying(y))
        return jax.lax.psum(y, summed), rounds

    def _local(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        matrices: ExpertWeights,
        *,
        shared: bool = False,
        placement: Placement | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        (batch, length, dim), top_k = x.shape, experts.shape[-1]
        chosen = experts.reshape(-1)
        order = order_by(chosen)
        rows = repeat_sorted(x.reshape(-1, dim), order)
        sizes = counts(chosen, self._num_experts)
        devices = _expert_axis_size()
        rounds = jnp.ones(())
        if devices == 1:
            y = self._summed(rows, sizes, matrices, order, weights.reshape(-1, top_k))
            return y.reshape(batch, length, dim), rounds
        if shared:
            y = self._own_experts(rows, sizes, matrices, devices)
        else:
            y, rounds = self._sent_to_experts(rows, sizes, matrices, placement, top_k)
        y = combine(y, order, weights.reshape(-1, top_k))
        return y.reshape(batch, length, dim), rounds

    def _own_experts(self, rows: jax.Array, sizes: jax.Array, matrices: ExpertWeights, devices: int) -> jax.Array:
        """Return `_network` for the rows of this device's experts, and zeros for all others."""
        mine = len(sizes) // devices
        first = jax.lax.axis_index("expert") * mine
        before = jnp.sum(jnp.where(jnp.arange(len(sizes)) < first, sizes, 0))
        own = jax.lax.dynamic_slice_in_dim(sizes, first, mine)
        return jnp.roll(self._network(jnp.roll(rows, -before, axis=0), own, matrices), before, axis=0)

    def _sent_to_experts(
        self, rows: jax.Array, sizes: jax.Array, matrices: ExpertWeights, placement: Placement | None, top_k: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return `_network` for experts that are on several devices, and in how many rounds rows were sent."""
        axis, own = "expert", self._num_experts // _expert_axis_size()
        everyone, starts = jax.lax.all_gather(sizes, axis), None
        if placement is not None:
            own = len(placement.experts) // _expert_axis_size()
            everyone, starts = rows_by_slot(everyone, placement)
        capacity = self._capacity(len(rows), own, top_k)
        rounds = jax.lax.pmax(all_to_all.count_rounds(everyone, capacity), tuple(sorted(varying(rows))))
        share = max(1.0, capacity / len(rows))

        def one(rows: jax.Array, matrices: ExpertWeights, sent: Any, into: jax.Array, turn: Any) -> jax.Array:
            plan = all_to_all.plan_round(sent[0], turn, capacity, axis, sent[1])
            received = all_to_all.to_experts(rows, plan, capacity, axis)
            with filled(share):  # exact if all experts are chosen equally often
                y = self._network(received, plan.sizes, matrices)
            return all_to_all.from_experts(y, into, plan, axis)

        return in_rounds(one, rows, matrices, (everyone, starts), rounds), rounds.astype(jnp.float32)

    def _capacity(self, rows: int, own: int, top_k: int) -> int:
        """Return the rows that a device takes in a round; at most as many experts of a token as its own are on it."""
        most = _expert_axis_size() * (rows // top_k) * min(top_k, own)
        wanted = -int(-self._capacity_factor * rows // 1)
        return min(most, -(-wanted // _ROWS) * _ROWS)

    def _summed(
        self, rows: jax.Array, sizes: jax.Array, matrices: ExpertWeights, order: Order, weights: jax.Array
    ) -> jax.Array:
        """Return the weighted sum of each token's experts, all of which are on this device, for sorted rows."""
        if matrices.down_bias is not None or isinstance(matrices.down, StackEntry):  # an engine's: without a gradient
            return combine(self._network(rows, sizes, matrices), order, weights)
        return weighted_results(self._units(rows, sizes, matrices), matrices.down, sizes, order, weights)

    def _network(self, x: jax.Array, sizes: jax.Array, matrices: ExpertWeights) -> jax.Array:
        """Return the output of each expert for its rows, sorted by expert; rows beyond the sizes become zeros."""
        y = _multiply(self._units(x, sizes, matrices), matrices.down, sizes)
        return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], y, 0)

    def _units(self, x: jax.Array, sizes: jax.Array, matrices: ExpertWeights) -> jax.Array:
        """Return the hidden units of each expert for its rows; rows beyond the sizes become zeros."""
        live = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
        gate = checkpoint_name(_multiply(x, matrices.gate, sizes), "gate")
        up = checkpoint_name(_multiply(x, matrices.up, sizes), "up")
        # A product is undefined for rows without a group, and those must not reach a gradient either.
        return no_fuse(jnp.where(live, self._hidden(gate, up), 0))

    def _hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up


def _multiply(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
    if isinstance(w, StackEntry):
        return product_in_stack(x, w.stack, w.index, sizes)
    return grouped_product(x, w, sizes)


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """Return gate * sigmoid(alpha * gate) * (up + 1), of a gate up to `limit` and of up within +-`limit`."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


class BiasedExperts(Experts):
    """Experts with biases and a clamped SwiGLU: gpt-oss."""

    class Config(Experts.Config):
        limit: float = 7.0
        alpha: float = 1.702

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        zeros, inner, outer = jax.nn.initializers.zeros, (cfg.num_experts, cfg.hidden), (cfg.num_experts, cfg.dim)
        self.gate_bias_ef = param(rngs, inner, ("experts", "hidden"), zeros)
        self.up_bias_ef = param(rngs, inner, ("experts", "hidden"), zeros)
        self.down_bias_ed = param(rngs, outer, ("experts", None), zeros)
        self._limit, self._alpha = cfg.limit, cfg.alpha

    @override
    def _weights(self) -> ExpertWeights:
        refuse_exact("experts with biases")
        biases = (self.gate_bias_ef[...], self.up_bias_ef[...], self.down_bias_ed[...])
        return ExpertWeights(*super()._weights()[:3], *biases)

    @override
    def _partitions(self) -> ExpertWeights:
        inner = partition("experts", "hidden")
        return ExpertWeights(*super()._partitions()[:3], inner, inner, partition("experts", None))

    @override
    def _network(self, x: jax.Array, sizes: jax.Array, matrices: ExpertWeights) -> jax.Array:
        ends, place = jnp.cumsum(sizes), jnp.arange(len(x))[:, None]
        # A product with ones and zeros: exact, and its gradient is no scatter. Rows beyond the sizes have no expert.
        expert = ((place >= ends - sizes) & (place < ends)).astype(x.dtype)

        def bias(of_expert: jax.Array) -> jax.Array:
            return jnp.dot(expert, of_expert, precision=jax.lax.Precision.HIGHEST)

        live = place < ends[-1]
        gate = checkpoint_name(_multiply(x, matrices.gate, sizes) + bias(matrices.gate_bias), "gate")
        up = checkpoint_name(_multiply(x, matrices.up, sizes) + bias(matrices.up_bias), "up")
        hidden = no_fuse(jnp.where(live, clamped_swiglu(gate, up, self._limit, self._alpha), 0))
        # The width is sharded, and results are summed over its devices: one of them adds the bias.
        return jnp.where(live, _multiply(hidden, matrices.down, sizes) + bias(matrices.down_bias) * _first(), 0)


def _expert_axis_size() -> int:
    return manual_axis_sizes("experts").get("expert", 1)


def _first() -> jax.Array | int:
    """Return 1 on the first of the devices that share the experts' width, and 0 on the others."""
    names = tuple(name for name, size in manual_axis_sizes("hidden").items() if size > 1)
    return (jax.lax.axis_index(names) == 0).astype(jnp.int32) if names else 1
