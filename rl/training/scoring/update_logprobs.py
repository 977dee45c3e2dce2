"""Log-probabilities, entropies and divergences from a reference of a batch's rows, by the update's forward pass."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axlearn_like.kernels.policy_head.sums import HeadRules
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import bind, split
from axlearn_like.layers.contexts.packed import GroupContext, PackedGroupContext
from axlearn_like.layers.contexts.sharded_rows import RowOrder, row_order, shard_rows
from axlearn_like.layers.moe.routing import PADDING
from axlearn_like.training.heads.chunked_head import map_chunks, merge_length, per_device_head
from axlearn_like.training.heads.tiled_head import OtherHead, head_statistics
from axlearn_like.training.losses import token_logprobs
from axlearn_like.training.step import SHARED
from mesh import UserError
from mesh.rules import constrain
from mesh.sharding import full_spec, shard_like, token_axes
from rl.rollout.decoding.drawing import among
from rl.training.columns import to_model
from rl.training.spec import UpdateSpec

# Arrays of a batch that `policy_logprobs` reads, where they are there.
_SCORED = ("prefix", "prefix_lengths", "inputs", "targets", "action_mask", "routing", "candidate_tokens", "starts")
_SCORED += ("ends", "prefix_segments", "segments", "prefix_positions", "positions", "paths", "lengths")
# Arrays of a batch that are the reference's: hidden states of the targets; and, shared by all rows, its output layer.
REFERENCE_STATES, REFERENCE_HEAD = "reference_states", "reference_head"
_PLACES = ("prefix_segments", "segments", "prefix_positions", "positions")  # fields of PackedGroupContext


def scored_arrays[T](batch: Mapping[str, T], *, routed: bool = True) -> dict[str, T]:
    """Return the arrays that `policy_logprobs` reads of a batch; `routed`: with experts, of this model alone."""
    return {name: batch[name] for name in _SCORED if name in batch and (routed or name != "routing")}


class Scored(NamedTuple):
    """log pi of the targets and the entropy at each, float32, shaped like them, and the layers' auxiliary outputs.

    Of trees they are shaped like `paths`: what completions share has the log-probability in each.
    `values`: of the state in which each target was drawn, if they were asked for, shaped likewise; else empty.
    `kl`: KL divergence of the whole distribution from the reference's, if the batch has that; shaped likewise; or None.
    """

    logprobs: jax.Array
    entropy: jax.Array
    aux: Aux
    values: Any = ()
    kl: Any = None


class _States(NamedTuple):
    """Final hidden states [rows, tokens, dim] in which the targets were drawn, and arrays of the targets likewise.

    `order`: in which devices share the tokens, the prompts' first; None: each has whole rows, of targets alone.
    """

    x: jax.Array
    each: dict[str, jax.Array]
    order: RowOrder | None
    aux: Aux


def policy_logprobs(
    model: Any,
    batch: Mapping[str, jax.Array],
    spec: UpdateSpec,
    values: Callable[[jax.Array], jax.Array] | None = None,
) -> Scored:
    """Return a model's input to the objective; `values`: hidden [batch, length, dim] -> [batch, length]."""
    (x, each, order, aux), targets = _states(model, batch, spec.chunks), batch["targets"]
    reference = None
    if REFERENCE_STATES in batch:
        graphdef = spec.reference_head or split(model.output)[0]
        layer: Any = bind(graphdef, batch[SHARED][REFERENCE_HEAD])  # pyright: ignore[reportArgumentType]
        reference = OtherHead(batch[REFERENCE_STATES], layer)
    logprobs, entropy, kl = _head(model.output, x, *each.values(), spec=spec, reference=reference)
    found: Any = (logprobs, entropy, () if values is None else values(x), kl)
    if order is not None:
        found = jax.tree.map(lambda one: order.join(one)[:, batch["prefix"].shape[1] :], found)
    found = jax.tree.map(lambda one: one.reshape(targets.shape), found)
    if "paths" in batch:
        found = along_paths(found, batch["paths"], batch["lengths"])
    return Scored(found[0], found[1], aux, *found[2:])


def hidden_states(model: Any, batch: Mapping[str, jax.Array], chunks: int = 1) -> jax.Array:
    """Return the final hidden states of the targets [rows, tokens, dim], as `policy_logprobs` has them on this mesh."""
    return _states(model, batch, chunks).x


def _states(model: Any, batch: Mapping[str, jax.Array], chunks: int) -> _States:
    groups, prefix, targets = batch["inputs"].shape[0], batch["prefix"], batch["targets"]
    tokens = jnp.concatenate([prefix, batch["inputs"].reshape(groups, -1)], axis=1)
    each: dict[str, jax.Array] = {"targets": targets.reshape(groups, -1)}
    if "candidate_tokens" in batch:
        each["candidate_tokens"] = batch["candidate_tokens"].reshape(*each["targets"].shape, -1)
    routing, context, first = batch.get("routing"), _context(batch, model), prefix.shape[1]
    if (order := row_order(tokens.shape[1], chunks)) is not None:
        # The head then computes prompts, too: cutting them off would move most tokens to other devices.
        context, tokens = shard_rows(context, order), order.split(tokens)
        each = {name: order.split(x, before=first, fill=0 if name == "targets" else -1) for name, x in each.items()}
        routing, first = None if routing is None else order.split(routing, fill=PADDING), 0
    hidden = model.hidden(tokens, context, routing=None if routing is None else to_model(model.routing_layout, routing))
    x = constrain(hidden.x, "batch", "length", None)  # whole rows, where stages of a pipeline have shared them
    return _States(x[:, first:], each, order, hidden.aux)


def _context(batch: Mapping[str, jax.Array], model: Any) -> GroupContext | PackedGroupContext:
    """Return the context of padded or of packed rows."""
    if batch["inputs"].ndim == 2:
        places = (batch[name] for name in _PLACES)
        return PackedGroupContext(*places, starts=batch.get("starts"), ends=batch.get("ends"))
    _, samples, length = batch["inputs"].shape
    used = _used_lengths(batch["action_mask"]) if getattr(model, "has_experts", False) else None
    return GroupContext(batch["prefix_lengths"], batch["prefix"].shape[1], samples, length, used)


def _head(
    output: Any,
    x: jax.Array,
    targets: jax.Array,
    *kept: jax.Array,
    spec: UpdateSpec,
    reference: OtherHead | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return log-probabilities of the targets and entropies, float32 [rows, length], of final hidden states.

    `kept`: the tokens that each target was drawn from, [rows, length, most], if they are recorded. `reference`: policy
    of which the KL divergence is the third result.
    """
    if spec.head_tile is not None:
        # By XLA on TPUs too: a kernel would need a shard_map over all axes of the mesh, not only over those of tokens.
        rules, candidates = HeadRules(spec.temperature, tile=spec.head_tile), kept[0] if kept else None
        found = head_statistics(output, x, targets, rules, candidates=candidates, reference=reference)
        return found.logprob, found.entropy, found.kl
    if reference is not None:
        raise UserError("trainer.head_tile: expected a multiple of 128 with an exact KL (--apply exact_kl); got None")

    def of_tokens(output: Any, x: jax.Array, targets: jax.Array, *kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = output.logits(x) / spec.temperature
        logits = among(logits, *kept) if kept else logits
        chosen = token_logprobs(logits, targets)
        logp = jax.nn.log_softmax(logits, axis=-1)
        return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def in_parts(output: Any, x: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(merge_length, map_chunks(partial(of_tokens, output), spec.chunks, x, *others))

    if spec.chunks == 1:
        return *of_tokens(output, x, targets, *kept), None
    return *per_device_head(output, in_parts, x, *(shard_like(one, x) for one in (targets, *kept))), None


def _used_lengths(action_mask: jax.Array) -> jax.Array:
    """Return int32 [g, n], tokens of each completion up to its last action: nothing is learned from those behind."""
    steps = jnp.arange(1, action_mask.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(action_mask, steps, 0), axis=-1)


def along_paths(rows: Any, paths: jax.Array, lengths: jax.Array) -> Any:
    """[b, t] -> [b, c, size]: the completions of each row, whose tokens are at `paths`, and of `lengths` [b, c]."""

    def own(rows: Any, paths: jax.Array, lengths: jax.Array) -> Any:
        live = jnp.arange(paths.shape[-1]) < lengths[..., None]
        take = jax.vmap(lambda row, at: row[at])
        return jax.tree.map(lambda x: jnp.where(live, take(x, paths), jnp.zeros((), x.dtype)), rows)

    spec = full_spec(paths)
    if spec is None or not (axes := token_axes(paths)):
        return own(rows, paths, lengths)
    spec = jax.P(spec[0])
    return jax.shard_map(own, in_specs=spec, out_specs=spec, axis_names=set(axes))(rows, paths, lengths)
