"""The programs of the policy trainer, described: what it runs is what is compiled ahead of time."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.chunked_head import map_chunks, merge_length, per_device_head
from axlearn_like.layers.contexts.packed import GroupContext
from axlearn_like.training.losses import Chosen, LossFn, token_logprobs, with_aux
from axlearn_like.training.program import check_length, describe_state
from axlearn_like.training.step import State, Step, make_train_step
from mesh import UserError
from mesh.rules import constrain, partition
from mesh.sharding import shard_like
from rl.objective import Objective
from rl.training.logprobs import row_length, score_rows

if TYPE_CHECKING:
    from rl.training.trainer import PolicyTrainer

Described = dict[str, jax.ShapeDtypeStruct]


class PolicyProgram(NamedTuple):
    """A step and what it takes."""

    step: Step  # jitted; donates the state
    state: State  # described
    batch: Described
    score: Callable[..., Chosen]  # jitted `score(params, tokens=, targets=, temperature=)`
    rows: Described  # keyword arguments of `score`


def policy_program(cfg: "PolicyTrainer.Config", mesh: Mesh, *, groups: int, samples: int) -> PolicyProgram:
    """The update of a batch in which every group has a gradient, and the scoring of as many rollouts.

    Args:
        cfg: of the trainer, as the experiment has completed it.
        mesh: of devices that need not be there.
        groups: prompts in a batch.
        samples: rollouts of each.

    Raises:
        UserError: the batch does not divide over the mesh, or sequences are longer than the model's positions.
    """
    cfg.check_rows(mesh)
    check_length(cfg.model, cfg.max_prompt + cfg.max_new, "max_prompt + max_new", "policy")
    objective = cfg.objective.build()
    with jax.set_mesh(mesh):
        learner = cfg.learner.build()
        graphdef, state, _ = describe_state(cfg.model, learner, mesh, "policy")
        loss_fn = make_policy_loss(graphdef, objective, cfg.temperature, cfg.microbatches, cfg.chunks)
        step = make_train_step(loss_fn, learner, cfg.microbatches, like=state, compiler_options=cfg.compiler_options)
        each_row = cfg.samples_per_row or samples
        arrays = batch_shapes(
            objective,
            groups=_padded(groups * samples // each_row, cfg.row_multiple),
            samples=each_row,
            max_prompt=cfg.max_prompt,
            max_new=cfg.max_new,
        )
        length = row_length(cfg.max_prompt, cfg.max_new)
        whole = jax.ShapeDtypeStruct((_padded(groups * samples, cfg.row_multiple), length), jnp.int32)
        rows = _spread({"tokens": whole, "targets": whole}, mesh)
        one = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=NamedSharding(mesh, jax.P(None)))
        return PolicyProgram(
            step, state, _spread(arrays, mesh), make_score_rows(graphdef, cfg.chunks), {**rows, "temperature": one}
        )


def make_policy_loss(
    graphdef: nnx.GraphDef[Any], objective: Objective, temperature: float, microbatches: int = 1, chunks: int = 1
) -> LossFn:
    """`loss_fn(params, batch)` on the arrays of `pack_groups`: the objective's, and the layers' own losses.

    Of these each microbatch, which is as many rows, gives its share. `chunks`: see `policy_logprobs`.
    """

    def loss_fn(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        scored = policy_logprobs(bind(graphdef, params), batch, temperature, chunks)
        loss, metrics = objective.loss(scored.logprobs, batch, scored.entropy)
        return with_aux(loss, metrics, scored.aux, 1 / microbatches)

    return loss_fn


def make_score_rows(graphdef: nnx.GraphDef[Any], chunks: int = 1) -> Callable[..., Chosen]:
    """The jitted `score_rows` of parameters."""
    return jax.jit(lambda params, **rows: score_rows(bind(graphdef, params), **rows, chunks=chunks))


class Scored(NamedTuple):
    """log pi of the targets and the entropy at each, float32 [g, n, t], and the layers' auxiliary outputs."""

    logprobs: jax.Array
    entropy: jax.Array
    aux: Aux


def policy_logprobs(model: Any, batch: Mapping[str, jax.Array], temperature: float, chunks: int = 1) -> Scored:
    """What the objective needs of a model, at the behaviour temperature; logits of one of `chunks` parts at a time."""
    groups, samples, length = batch["inputs"].shape
    trunk = batch["trunk"]
    context = GroupContext(batch["trunk_lengths"], trunk.shape[1], samples, length)
    tokens = jnp.concatenate([trunk, batch["inputs"].reshape(groups, -1)], axis=1)
    hidden = model.hidden(tokens, context)
    x = constrain(hidden.x, "batch", "length", None)  # whole rows, where stages of a pipeline have shared them
    answers, targets = x[:, trunk.shape[1] :], batch["targets"].reshape(groups, -1)

    def of_tokens(output: Any, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = output.logits(x) / temperature
        chosen = token_logprobs(logits, targets)
        logp = jax.nn.log_softmax(logits, axis=-1)
        return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def in_parts(output: Any, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(merge_length, map_chunks(partial(of_tokens, output), chunks, x, targets))

    if chunks == 1:
        chosen, entropy = of_tokens(model.output, answers, targets)
    else:
        chosen, entropy = per_device_head(model.output, in_parts, answers, shard_like(targets, answers))
    return Scored(chosen.reshape(batch["targets"].shape), entropy.reshape(batch["targets"].shape), hidden.aux)


def batch_shapes(objective: Objective, *, groups: int, samples: int, max_prompt: int, max_new: int) -> Described:
    """The arrays of `pack_groups` for so many rows, of so many samples each, that all have a gradient."""
    each = (groups, samples, max_new)
    shapes: Described = {
        "trunk": jax.ShapeDtypeStruct((groups, max_prompt - 1), jnp.int32),
        "trunk_lengths": jax.ShapeDtypeStruct((groups,), jnp.int32),
        "inputs": jax.ShapeDtypeStruct(each, jnp.int32),
        "targets": jax.ShapeDtypeStruct(each, jnp.int32),
        "action_mask": jax.ShapeDtypeStruct(each, jnp.bool_),
        "logprobs_behaviour": jax.ShapeDtypeStruct(each, jnp.float32),
    }
    # What the objective adds is known from an example of its smallest size.
    one = (1, samples)
    rewards = np.arange(samples, dtype=np.float64)[None]
    prepared = objective.prepare(
        rewards, np.ones((*one, 1), bool), truncated=np.zeros(one, bool), scored=np.ones(one, bool)
    )
    for name, array in prepared.arrays.items():
        if array.shape != (*one, 1)[: array.ndim]:
            raise UserError(f"objective: array {name!r} has shape {array.shape}; expected groups x samples x tokens")
        shapes[name] = jax.ShapeDtypeStruct(each[: array.ndim], array.dtype)
    return shapes


def _spread(arrays: Described, mesh: Mesh) -> Described:
    """Along the first axis, as `shard_batch` does."""

    def spread(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = partition("batch", *[None] * (len(one.shape) - 1)) or jax.P()
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(spread, arrays)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
