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
from axlearn_like.learner import Learner
from axlearn_like.training.losses import Chosen, LossFn, with_aux
from axlearn_like.training.program import TrainProgram, describe_state, drops_out
from axlearn_like.training.step import AccumulatedStep, make_train_step
from mesh import UserError
from mesh.programs.shared import shared_program
from mesh.rules import axis_sizes, complete_rows, partition
from mesh.sharding import full_spec, token_axes
from rl.objective import Objective
from rl.objective.rollouts import PerToken
from rl.training.batching.arrays import Added, Described, added_by, packed_arrays, padded_arrays
from rl.training.batching.layout import PaddedRows
from rl.training.columns import Columns
from rl.training.logprobs import padded, row_length, score_rows
from rl.training.packing import Packing
from rl.training.scoring.update_logprobs import Scored, policy_logprobs
from rl.training.spec import UpdateSpec


def policy_program(
    model: ConfigBase,
    objective: Objective,
    learner: Learner,
    mesh: Mesh,
    spec: UpdateSpec,
    compiler_options: Mapping[str, str] | None = None,
) -> TrainProgram:
    """Return the update of a policy on a mesh, whose devices need not exist (UserError: it does not fit)."""
    if (path := drops_out(model)) is not None:
        raise UserError(f"policy.{path}.dropout: expected 0 in RL: rollouts are drawn, and scored, without dropout")
    with jax.set_mesh(mesh):
        graphdef, state, init = describe_state(model, learner, mesh, "policy")
        options: dict[str, Any] = {"like": state, "compiler_options": compiler_options}
        if spec.max_new_tokens is None:
            loss_fn = make_policy_loss(graphdef, objective, spec)
            return TrainProgram(make_train_step(loss_fn, learner, spec.microbatches, **options), state, graphdef, init)
        loss_fn = make_packed_loss(graphdef, objective, spec)
        return TrainProgram(AccumulatedStep(loss_fn, learner, **options), state, graphdef, init)


def make_policy_loss(graphdef: nnx.GraphDef[Any], objective: Objective, spec: UpdateSpec) -> LossFn:
    """Return `loss_fn(params, batch)` on the arrays of `fill_padded`: the objective's, and the layers' own losses."""

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        scored = _scored(graphdef, params, batch, spec)
        loss, metrics = objective.loss(scored.logprobs, batch, scored.entropy, scored.kl)
        if spec.values is not None:
            loss, metrics = spec.values.add(loss, metrics, scored.values, batch)
        return with_aux(loss, metrics, scored.aux, 1 / spec.microbatches)

    return loss_fn


def make_packed_loss(graphdef: nnx.GraphDef[Any], objective: Objective, spec: UpdateSpec) -> LossFn:
    """Return `loss_fn(params, batch)` on the arrays of `fill_packed`; the objective gets a row for each completion.

    The layers' own losses are means over a microbatch's tokens, and count by its share of the update's weight.
    """
    max_new_tokens = spec.max_new_tokens
    assert max_new_tokens is not None, "of packed rows"
    of_tokens = {name for name, (rank, _) in added_arrays(objective, 2).items() if rank == 3}
    of_tokens |= {"action_mask", "logprobs_behaviour", *(column.name for column in spec.columns if not column.scored)}

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        scored = _scored(graphdef, params, batch, spec)
        share, found = jnp.sum(batch["metric_weights"]), (scored.logprobs, scored.entropy, scored.values, scored.kl)
        if "paths" not in batch:  # else there is a row for each completion already
            rows: dict[str, Any] = {name: batch[name] for name in of_tokens} | {"": found}
            rows = unpack_rows(rows, batch["first"], batch["lengths"], max_new_tokens)
            found, batch = rows.pop(""), {**batch, **rows}
        logprobs, entropy, read, kl = found
        loss, metrics = objective.loss(logprobs, batch, entropy, kl)
        if spec.values is not None:
            loss, metrics = spec.values.add(loss, metrics, read, batch)
        return with_aux(loss, metrics, scored.aux, share)

    return loss_fn


def _scored(graphdef: nnx.GraphDef[Any], params: Params, batch: Mapping[str, jax.Array], spec: UpdateSpec) -> Scored:
    """Return the objective's input and, with a critic, the values of the tokens' states by the same forward pass."""
    if spec.values is None:
        return policy_logprobs(bind(graphdef, params), batch, spec)
    model = bind(graphdef, spec.values.policy(params))
    return policy_logprobs(model, batch, spec, partial(spec.values.read, params))


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


def added_arrays(objective: Objective, samples: int) -> Added:
    """Return the arrays that the objective needs, known from its smallest example; `samples`: of a group."""
    one = (1, samples)
    rewards = np.arange(samples, dtype=np.float64)[None]
    prepared = objective.prepare(
        rewards,
        np.ones((*one, 1), bool),
        truncated=np.zeros(one, bool),
        scored=np.ones(one, bool),
        per_token=PerToken(np.zeros((*one, 1)), np.zeros((*one, 1)) if objective.needs_values else None),
    )
    for name, array in prepared.arrays.items():
        if array.shape != (*one, 1)[: array.ndim]:
            raise UserError(f"objective: array {name!r} has shape {array.shape}; expected groups x samples x tokens")
    others = {"logprobs_old": objective.needs_old, "logprobs_reference": objective.needs_reference}
    return {**added_by(prepared), **{name: (3, np.float32) for name, needed in others.items() if needed}}


def describe_batch(
    objective: Objective,
    mesh: Mesh,
    *,
    layout: PaddedRows,
    groups: int,
    samples: int,
    columns: Columns = (),
) -> Described:
    """Return the arrays of an update in which every group has a gradient, sharded as `shard_batch` does."""
    each_row = layout.samples_per_row or samples
    rows = padded(groups * samples // each_row, layout.row_multiple)
    sizes = {"max_prompt_tokens": layout.max_prompt_tokens, "max_new_tokens": layout.max_new_tokens}
    shapes = padded_arrays(added_arrays(objective, each_row), rows=rows, samples=each_row, **sizes)
    return sharded_rows(_with_columns(shapes, columns, shapes["targets"].shape), mesh)


def describe_packed(
    objective: Objective,
    packing: Packing,
    mesh: Mesh,
    length: int,
    *,
    samples: int,
    columns: Columns = (),
) -> Described:
    """Return the arrays of a microbatch of rows of this length, sharded as `shard_batch` does; the mesh is set."""
    rows = packing.rows * math.prod(axis_sizes("batch").values())
    shapes = packed_arrays(added_arrays(objective, samples), packing, rows=rows, length=length)
    return sharded_rows(_with_columns(shapes, columns, shapes["action_mask"].shape), mesh)


def _with_columns(shapes: Described, columns: Columns, tokens: tuple[int, ...]) -> Described:
    prompts = shapes["prefix"].shape[1]
    return shapes | {column.name: column.describe(tokens, prompts) for column in columns}


def describe_rows(mesh: Mesh, sizes: PaddedRows, *, rollouts: int, columns: Columns = ()) -> Described:
    """Return the keyword arguments of `make_score_rows` for so many rollouts."""
    with complete_rows():
        shape = scored_rows(rollouts, sizes.row_multiple), row_length(sizes.max_prompt_tokens, sizes.max_new_tokens)
        whole = jax.ShapeDtypeStruct(shape, jnp.int32)
        temperature = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=NamedSharding(mesh, jax.P(None)))
        records = {column.name: column.describe(shape) for column in columns if column.scored}
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
