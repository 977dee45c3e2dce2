"""The programs that a zebra step is made of: each is jitted, and runs on one group of devices.

A layer is recomputed from its input in the backward pass, so a microbatch keeps one array a layer on attention's
devices, and on experts' devices what its tokens sent.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase
from axlearn_like.layers.aux import Aux, reduce_layers
from axlearn_like.layers.base import Layer, bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Hidden
from axlearn_like.training.losses import Loss
from axlearn_like.training.step import zeros_like
from mesh.rules import constrain
from mesh.sharding import gather_length, shard_residual, split_rows


class HandOver(Layer):
    """The place of experts in a block: they are elsewhere, and the next layer adds what they make."""

    def __init__(self, keep: Callable[..., None] | None = None):
        """`keep` is called with what experts are: inputs, choices, and their weights."""
        self.keep = keep

    def __call__(self, x_btd: jax.Array, experts_btk: jax.Array, weights_btk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return zeros for the sum of experts, and one round."""
        assert self.keep is not None
        self.keep(x_btd, experts_btk, weights_btk)
        return jnp.zeros_like(x_btd), jnp.ones(())


class SentRows(NamedTuple):
    """Arrays of a microbatch that its experts need, sharded by rows."""

    x: jax.Array  # normalised inputs [batch, length, dim]
    weights: jax.Array  # float32 [batch, length, top_k]
    experts: jax.Array  # int32 [batch, length, top_k]; the number of experts: padding


class Attended(NamedTuple):
    """The result of all of a layer but its experts."""

    x: jax.Array  # the layer's input, kept for the backward pass
    residual: jax.Array  # [batch, length, dim], to which the sum of experts is added
    sent: SentRows
    aux: Aux


class _Ended:
    """A decoder whose final hidden states are there already, as losses take it."""

    def __init__(self, decoder: Any, hidden: Hidden):
        self._decoder, self._hidden = decoder, hidden

    def hidden(self, *_: Any, **__: Any) -> Hidden:
        """Return the hidden states."""
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


class AttentionStages:
    """Programs of attention's devices: embedding, layers without their experts, and the loss.

    `params` are {"rest": the decoder's without experts}; `grads` are float32 sums like it, and are donated. A layer's
    input is the sum of `parts`: the residual before it, and what experts made of it.
    """

    def __init__(self, model: ConfigBase[Any], loss: Loss, microbatches: int):
        self._graphdef, _ = split(build_abstract(model, _hand_over))
        self._block, _ = split(build_abstract(model, _hand_over).layers)
        self._loss, self._dtype = loss, jnp.dtype(getattr(model, "dtype", "float32"))
        donated: Any = partial(jax.jit, donate_argnames="grads")
        self.slices: Any = jax.jit(lambda batch: _slices(batch, microbatches))
        self.zeros: Any = jax.jit(lambda params: jax.tree.map(zeros_like, params))
        self.embed: Any = jax.jit(self._embed)
        self.attend: Any = jax.jit(self._attend)
        self.finish: Any = donated(self._finish)
        self.attend_back: Any = donated(self._attend_back)
        self.embed_back: Any = donated(self._embed_back)

    def _embed(self, rest: Any, batch: Any) -> jax.Array:
        embedding = bind(self._graphdef, rest).embedding
        return shard_residual(embedding(batch["tokens"], self._dtype, _context(batch)))

    def _embed_back(self, rest: Any, batch: Any, g: jax.Array, grads: Any) -> Any:
        top, layers = _top(rest)
        x, back = jax.vjp(lambda top: self._embed({**top, **layers}, batch), top)
        return _added(grads, back(_sharded_as(g, x))[0])

    def _attend(self, rest: Any, layer: jax.Array, parts: Sequence[jax.Array], batch: Any) -> Attended:
        x = _total(parts)
        return self._attended(_entry(rest["layers"], layer), x, batch)

    def _attended(self, params: Any, x: jax.Array, batch: Any) -> Attended:
        block = bind(self._block, params)
        given: list[Any] = []
        block.feed_forward.experts = HandOver(lambda *rows: given.extend(rows))
        residual, _, aux = block(x, _context(batch), None)
        rows, experts, weights = given
        sent = SentRows(*map(_by_rows, (rows, weights, experts)))
        return Attended(x, residual, sent, Aux(aux.losses, aux.metrics))

    def _attend_back(
        self, rest: Any, layer: jax.Array, x: jax.Array, batch: Any, g: jax.Array, of_experts: Any, grads: Any
    ) -> tuple[jax.Array, Any]:
        """Return the gradient of the layer's input, and the sums with those of its parameters.

        Args:
            g: gradient of the residual.
            of_experts: gradients of the layers' own losses, [layers], and those of `SentRows.x` and `SentRows.weights`
                by each group. So a router's gradient has two branches: the weights of its choice scale what experts
                return.
        """
        losses, sent = of_experts

        def run(params: Any, x: jax.Array) -> Any:
            done = self._attended(params, x, batch)
            return done.residual, done.sent.x, done.sent.weights, done.aux.losses

        done, back = jax.vjp(run, _entry(rest["layers"], layer), x)
        of_x, of_weights = (_total(each) for each in zip(*sent, strict=True))
        of_layer, of_input = back((_sharded_as(g, done[0]), of_x, of_weights, _entry(losses, layer)))
        return _by_rows(of_input), {**grads, "layers": add_entry(grads["layers"], layer, of_layer)}

    def _finish(self, rest: Any, parts: Sequence[jax.Array], aux: Sequence[Aux], batch: Any, grads: Any) -> Any:
        """Return metrics, gradients of the last layer's output and of the layers' own losses, and the sums."""
        top, layers = _top(rest)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *aux)

        def run(top: Any, x: jax.Array, losses: Any) -> Any:
            decoder = bind(self._graphdef, {**top, **layers})
            hidden = Hidden(gather_length(decoder.norm(x)), None, reduce_layers(Aux(losses, stacked.metrics)))
            return self._loss(_Ended(decoder, hidden), batch)

        found = jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)(top, _total(parts), stacked.losses)
        (_, metrics), (of_top, of_x, of_losses) = found
        return metrics, _by_rows(of_x), of_losses, _added(grads, of_top)


class ExpertStages:
    """Programs of the experts `first` to `first + count` of every layer that has so many here."""

    def __init__(self, experts: ConfigBase[Any], first: int, count: int):
        """Take the config of all experts of a layer, resolved."""
        self._graphdef, _ = split(build_abstract(experts.clone(num_experts=count)))
        self._first, self._count = first, count
        self.compute: Any = jax.jit(self._compute)
        self.compute_back: Any = jax.jit(self._compute_back, donate_argnames="grads")

    def _compute(self, stack: Any, at: jax.Array, sent: SentRows) -> tuple[jax.Array, jax.Array]:
        """Return the weighted sum of each token's experts among these, [batch, length, dim], and the rounds."""
        return self._sum(_entry(stack, at), sent)

    def _sum(self, params: Any, sent: SentRows) -> tuple[jax.Array, jax.Array]:
        own = sent.experts - self._first
        chosen = jnp.where((own >= 0) & (own < self._count), own, self._count)  # padding, as far as these are concerned
        y, rounds = bind(self._graphdef, params)(sent.x, chosen, sent.weights)
        return _by_rows(y), rounds

    def _compute_back(self, stack: Any, at: jax.Array, sent: SentRows, g: jax.Array, grads: Any) -> tuple[Any, Any]:
        """Return the gradients of `sent.x` and `sent.weights`, and the sums with those of the matrices."""

        def run(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
            return self._sum(params, SentRows(x, weights, sent.experts))[0]

        of_params, of_x, of_weights = jax.vjp(run, _entry(stack, at), sent.x, sent.weights)[1](g)
        return (of_x, of_weights), add_entry(grads, at, of_params)


def add_entry(stacks: Any, index: jax.Array, entry: Any) -> Any:
    """Return stacks with an entry added at a place of the first axis."""

    def one(stack: jax.Array, new: jax.Array) -> jax.Array:
        total = jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False) + new.astype(stack.dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, total, index, 0)

    return jax.tree.map(one, stacks, entry)


def _hand_over(decoder: Any) -> Any:
    decoder.layers.feed_forward.experts = HandOver()
    return decoder


def _context(batch: Any) -> PackedContext:
    return PackedContext(batch["positions"], batch["segment_ids"])


def _slices(batch: Any, count: int) -> list[Any]:
    """Return the microbatches: every `count`-th row."""
    sliced = jax.tree.map(lambda x: split_rows(x, count), batch)
    return [jax.tree.map(lambda x, at=at: x[at], sliced) for at in range(count)]


def _top(rest: Any) -> tuple[Any, Any]:
    """Return the parameters beside the layers, and the layers."""
    return {name: part for name, part in rest.items() if name != "layers"}, {"layers": rest["layers"]}


def _added(grads: Any, top: Any) -> Any:
    return {**grads, **{name: jax.tree.map(jnp.add, grads[name], part) for name, part in top.items()}}


def _entry(stack: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), stack)


def _total(parts: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of arrays, sharded as the first one is."""
    first, *others = parts
    return sum((_sharded_as(part, first) for part in others), first)


def _sharded_as(x: jax.Array, other: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, jax.typeof(other).sharding.spec)


def _by_rows(x: jax.Array) -> jax.Array:
    """Return [batch, length, ...] sharded by rows alone, as arrays travel."""
    return constrain(x, "batch", None, None)
