"""The programs of the policy trainer, described: ahead-of-time compilation compiles what it runs."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.exact.scope import COMPILER_OPTIONS, Numerics
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.learner import Learner
from axlearn_like.training.losses import Chosen, LossFn, with_aux
from axlearn_like.training.program import TrainProgram, describe_state, drops_out
from axlearn_like.training.step import AccumulatedStep, make_train_step
from mesh import UserError
from mesh.programs.shared import shared_program
from mesh.rules import axis_sizes, complete_rows, partition
from mesh.sharding import full_spec, token_axes
from rl.objective import Objective
from rl.training.batching.arrays import PREFIX
from rl.training.batching.trees import TREES
from rl.training.critic.shared import ValueTerm
from rl.training.logprobs import padded, row_length, score_rows
from rl.training.packing import Packing
from rl.training.replay import describe_routing, describe_support
from rl.training.scoring.update_logprobs import Scored, policy_logprobs

Described = dict[str, jax.ShapeDtypeStruct]


def policy_program(
    model: ConfigBase,
    objective: Objective,
    learner: Learner,
    mesh: Mesh,
    *,
    temperature: float,
    microbatches: int = 1,
    chunks: int = 1,
    head_tile: int | None = None,
    max_new_tokens: int | None = None,
    values: ValueTerm | None = None,
    other: nnx.GraphDef[Any] | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> TrainProgram:
    """Return the update of a policy on a mesh, whose devices need not exist (UserError: it does not fit).

    `max_new_tokens`: the update is by microbatches of several shapes, of completions of at most so many tokens.
    `values`: the value loss of a critic on the policy's hidden states, of which `learner` is a `JointLearner`. `other`:
    see `policy_logprobs`.
    """
    if (path := drops_out(model)) is not None:
        raise UserError(f"policy.{path}.dropout: expected 0 in RL: rollouts are drawn, and scored, without dropout")
    with jax.set_mesh(mesh):
        graphdef, state, init = describe_state(model, learner, mesh, "policy")
        options: dict[str, Any] = {"like": state, "compiler_options": compiler_options}
        if max_new_tokens is None:
            loss_fn = make_policy_loss(graphdef, objective, temperature, microbatches, chunks, head_tile, values, other)
            return TrainProgram(make_train_step(loss_fn, learner, microbatches, **options), state, graphdef, init)
        loss_fn = make_packed_loss(graphdef, objective, temperature, max_new_tokens, chunks, head_tile, values, other)
        return TrainProgram(AccumulatedStep(loss_fn, learner, **options), state, graphdef, init)


def make_policy_loss(
    graphdef: nnx.GraphDef[Any],
    objective: Objective,
    temperature: float,
    microbatches: int = 1,
    chunks: int = 1,
    head_tile: int | None = None,
    values: ValueTerm | None = None,
    other: nnx.GraphDef[Any] | None = None,
) -> LossFn:
    """Return `loss_fn(params, batch)` on the arrays of `pack_groups`: the objective's, and the layers' own losses.

    Each microbatch contributes 1/microbatches of the layers' own losses. `chunks`, `head_tile`, `other`: see
    `policy_logprobs`. `values`: see `policy_program`.
    """

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        scored = _scored(graphdef, params, batch, temperature, chunks, head_tile, values, other)
        loss, metrics = objective.loss(scored.logprobs, batch, scored.entropy, scored.kl)
        if values is not None:
            loss, metrics = values.add(loss, metrics, scored.values, batch)
        return with_aux(loss, metrics, scored.aux, 1 / microbatches)

    return loss_fn


def make_packed_loss(
    graphdef: nnx.GraphDef[Any],
    objective: Objective,
    temperature: float,
    max_new_tokens: int,
    chunks: int = 1,
    head_tile: int | None = None,
    values: ValueTerm | None = None,
    other: nnx.GraphDef[Any] | None = None,
) -> LossFn:
    """Return `loss_fn(params, batch)` on the arrays of `fill_packed`; the objective gets a row for each completion.

    The layers' own losses are means over a microbatch's tokens, and count by its share of the update's weight.
    """
    of_tokens = {name for name, rank, _ in _objective_arrays(objective, 2) if rank == 3}
    of_tokens |= {"action_mask", "logprobs_behaviour"}

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        scored = _scored(graphdef, params, batch, temperature, chunks, head_tile, values, other)
        share, found = jnp.sum(batch["metric_weights"]), (scored.logprobs, scored.entropy, scored.values, scored.kl)
        if "paths" not in batch:  # else there is a row for each completion already
            rows: dict[str, Any] = {name: batch[name] for name in of_tokens} | {"": found}
            rows = unpack_rows(rows, batch["first"], batch["lengths"], max_new_tokens)
            found, batch = rows.pop(""), {**batch, **rows}
        logprobs, entropy, read, kl = found
        loss, metrics = objective.loss(logprobs, batch, entropy, kl)
        if values is not None:
            loss, metrics = values.add(loss, metrics, read, batch)
        return with_aux(loss, metrics, scored.aux, share)

    return loss_fn


def _scored(
    graphdef: nnx.GraphDef[Any],
    params: Params,
    batch: Mapping[str, jax.Array],
    temperature: float,
    chunks: int,
    head_tile: int | None,
    values: ValueTerm | None,
    other: nnx.GraphDef[Any] | None,
) -> Scored:
    """Return the objective's input and, with `values`, those of the tokens' states by the same forward pass."""
    if values is None:
        return policy_logprobs(bind(graphdef, params), batch, temperature, chunks, head_tile, None, other)
    model = bind(graphdef, values.policy(params))
    return policy_logprobs(model, batch, temperature, chunks, head_tile, partial(values.read, params), other)


def unpack_rows(rows: dict[str, Any], first: jax.Array, lengths: jax.Array, size: int) -> dict[str, Any]:
    """[b, t] -> [b, c, size]: the completions of each row, which begin at `first` and have `lengths`; both [b, c]."""

    def own(rows: dict[str, Any], first: jax.Array, lengths: jax.Array) -> dict[str, Any]:
        live = jnp.arange(size) < lengths[..., None]

        def unpack(x: jax.Array) -> jax.Array:
            long = jnp.pad(x, ((0, 0), (0, size)))
            cut = jax.vmap(jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (size,)), (None, 0)))
            return jnp.where(live, cut(long, first), jnp.zeros((), x.dtype))

        return jax.tree.map(unpack, rows)

    spec = full_spec(first)
    if spec is None or not (axes := token_axes(first)):
        return own(rows, first, lengths)
    spec = jax.P(spec[0])
    return jax.shard_map(own, in_specs=spec, out_specs=spec, axis_names=set(axes))(rows, first, lengths)


def make_score_rows(
    graphdef: nnx.GraphDef[Any], chunks: int = 1, numerics: Numerics = "default", tile: int | None = None
) -> Callable[..., Chosen]:
    """Return the jitted `score(params, tokens=, targets=, temperature=)`; `numerics` are those of the policy.

    `chunks`, `tile`: as of `score_rows`.
    Rows are complete, in the engine's order of sums: a mesh that shards the length of rows scores more of them at once.
    """
    options: Any = {"compiler_options": COMPILER_OPTIONS} if numerics == "exact" else {}

    def score(params: Params, **rows: Any) -> Chosen:
        with complete_rows():
            return score_rows(bind(graphdef, params), **rows, chunks=chunks, tile=tile)

    return shared_program(("score rows", graphdef, chunks, tile), lambda: jax.jit(score, **options))


def batch_shapes(
    objective: Objective,
    *,
    groups: int,
    samples: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    replay: RoutingLayout | None = None,
    support: int | None = None,
) -> Described:
    """Return the arrays of `pack_groups` for rows of `samples` each that all have a gradient.

    `replay`: with the record of this layout. `support`: with a record of so many tokens for each.
    """
    each = (groups, samples, max_new_tokens)
    shapes: Described = {
        "prefix": jax.ShapeDtypeStruct((groups, max_prompt_tokens - 1), jnp.int32),
        "prefix_lengths": jax.ShapeDtypeStruct((groups,), jnp.int32),
        "inputs": jax.ShapeDtypeStruct(each, jnp.int32),
        "targets": jax.ShapeDtypeStruct(each, jnp.int32),
        "action_mask": jax.ShapeDtypeStruct(each, jnp.bool_),
        "logprobs_behaviour": jax.ShapeDtypeStruct(each, jnp.float32),
    }
    for name, rank, dtype in _objective_arrays(objective, samples):
        shapes[name] = jax.ShapeDtypeStruct(each[:rank], dtype)
    if replay is not None:
        shapes["routing"] = describe_routing(replay, groups, max_prompt_tokens - 1 + samples * max_new_tokens)
    if support is not None:
        shapes["support"] = describe_support(support, *each)
    return shapes


def packed_shapes(
    objective: Objective,
    packing: Packing,
    *,
    rows: int,
    length: int,
    samples: int,
    replay: RoutingLayout | None = None,
    support: int | None = None,
) -> Described:
    """Return the arrays of `fill_packed`; `samples` are those of a group. `replay`, `support`: see `batch_shapes`."""

    def ints(width: int, *names: str) -> Described:
        return {name: jax.ShapeDtypeStruct((rows, width), jnp.int32) for name in names}

    each = (rows, packing.completions)
    tokens = (*each, packing.max_new_tokens) if packing.tree else (rows, length)
    places = TREES if packing.tree else ("inputs", "targets", "segments", "positions", "starts")
    shapes = {
        **ints(packing.prompts, *PREFIX),
        **ints(length, *places),
        **ints(packing.completions, *(("lengths",) if packing.tree else ("first", "lengths"))),
        **({"paths": jax.ShapeDtypeStruct(tokens, jnp.int32)} if packing.tree else {}),
        "action_mask": jax.ShapeDtypeStruct(tokens, jnp.bool_),
        "logprobs_behaviour": jax.ShapeDtypeStruct(tokens, jnp.float32),
    }
    for name, rank, dtype in _objective_arrays(objective, samples):
        shapes[name] = jax.ShapeDtypeStruct(tokens if rank == 3 else each, dtype)
    if replay is not None:
        shapes["routing"] = describe_routing(replay, rows, packing.prompts + length)
    if support is not None:
        shapes["support"] = describe_support(support, rows, length)
    return shapes


def _objective_arrays(objective: Objective, samples: int) -> list[tuple[str, int, Any]]:
    """Return name, rank and dtype of the arrays that the objective needs, known from its smallest example."""
    one = (1, samples)
    rewards = np.arange(samples, dtype=np.float64)[None]
    prepared = objective.prepare(
        rewards,
        np.ones((*one, 1), bool),
        truncated=np.zeros(one, bool),
        scored=np.ones(one, bool),
        divergence=np.zeros((*one, 1)),
        values=np.zeros((*one, 1)) if objective.needs_values else None,
    )
    for name, array in prepared.arrays.items():
        if array.shape != (*one, 1)[: array.ndim]:
            raise UserError(f"objective: array {name!r} has shape {array.shape}; expected groups x samples x tokens")
    found: list[tuple[str, int, Any]] = [(name, array.ndim, array.dtype) for name, array in prepared.arrays.items()]
    others = {"logprobs_old": objective.needs_old, "logprobs_reference": objective.needs_reference}
    return found + [(name, 3, np.float32) for name, needed in others.items() if needed]


def describe_batch(
    objective: Objective,
    mesh: Mesh,
    *,
    groups: int,
    samples: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    row_multiple: int = 1,
    samples_per_row: int | None = None,
    replay: RoutingLayout | None = None,
    support: int | None = None,
) -> Described:
    """Return the arrays of an update in which every group has a gradient, sharded as `shard_batch` does."""
    each_row = samples_per_row or samples
    rows = padded(groups * samples // each_row, row_multiple)
    sizes: dict[str, Any] = {
        "groups": rows,
        "samples": each_row,
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
    }
    return sharded_rows(batch_shapes(objective, **sizes, replay=replay, support=support), mesh)


def describe_packed(
    objective: Objective,
    packing: Packing,
    mesh: Mesh,
    length: int,
    *,
    samples: int,
    replay: RoutingLayout | None = None,
    support: int | None = None,
) -> Described:
    """Return the arrays of a microbatch of rows of this length, sharded as `shard_batch` does; the mesh is set."""
    rows = packing.rows * math.prod(axis_sizes("batch").values())
    sizes: dict[str, Any] = {"rows": rows, "length": length, "samples": samples}
    return sharded_rows(packed_shapes(objective, packing, **sizes, replay=replay, support=support), mesh)


def describe_rows(
    mesh: Mesh,
    *,
    rollouts: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    row_multiple: int = 1,
    replay: RoutingLayout | None = None,
    support: int | None = None,
) -> Described:
    """Return the keyword arguments of `make_score_rows` for so many rollouts."""
    with complete_rows():
        shape = (scored_rows(rollouts, row_multiple), row_length(max_prompt_tokens, max_new_tokens))
        whole = jax.ShapeDtypeStruct(shape, jnp.int32)
        temperature = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=NamedSharding(mesh, jax.P(None)))
        records = {} if replay is None else {"routing": describe_routing(replay, *shape)}
        records |= {} if support is None else {"support": describe_support(support, *shape)}
        return {**sharded_rows({"tokens": whole, "targets": whole, **records}, mesh), "temperature": temperature}


def scored_rows(rollouts: int, row_multiple: int) -> int:
    """Return the rows in which so many rollouts are scored, under `complete_rows`: they divide over the devices."""
    return padded(rollouts, math.lcm(row_multiple, math.prod(axis_sizes("batch").values())))


def sharded_rows(arrays: Described, mesh: Mesh) -> Described:
    """Return the arrays, sharded along the first axis as `shard_batch` does."""

    def sharded(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = partition("batch", *[None] * (len(one.shape) - 1)) or jax.P()
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(sharded, arrays)
