"""The programs of training, described: ahead-of-time compilation compiles what the trainer runs; what tunes them.

Nothing is allocated here. Arrays are `jax.ShapeDtypeStruct`s with shardings, so the devices of the mesh need not exist.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axlearn_like.config import ConfigBase, ConfigError, errors_at, path_of, walk_configs
from axlearn_like.input import SupervisedInput
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.attention.rope_scaling import LongRopeScaling
from axlearn_like.layers.base import Params, split
from axlearn_like.layers.embedding import PositionedEmbedding
from axlearn_like.learner import Learner
from axlearn_like.operations.flops import model_flops, rows_workload
from axlearn_like.training.alignment.scoring import describe_scored
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.losses import Loss, eval_step, make_supervised_loss
from axlearn_like.training.replicas import by_plan
from axlearn_like.training.step import State, Step, init_state, make_train_step
from mesh import make_mesh, to_named_sharding
from mesh.batches import batch_partition
from mesh.cost.program import Program, Programs
from mesh.rules import AxisRules, mesh_axes, use_mesh


class TrainProgram(NamedTuple):
    """A train step and what it takes."""

    step: Step  # jitted; donates the state
    state: State  # described
    graphdef: nnx.GraphDef[Any]  # graph of the model
    init: Callable[[jax.Array], Params]  # key -> the first parameters, for `first_params`


def train_program(
    model: ConfigBase,
    inputs: SupervisedInput.Config,
    loss: Loss,
    learner: Learner,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    compiler_options: Mapping[str, str] | None = None,
    seed: int = 0,
) -> TrainProgram:
    """Return the supervised train step on a mesh; `seed`: with step, microbatch, layer and matrix that of dropout.

    Raises:
        UserError: the batch does not divide over the mesh, or its rows are longer than the model's positions.
    """
    check_rows(inputs, mesh, microbatches)
    check_length(model, inputs.seq_len, f"{path_of(inputs)}.seq_len")
    with jax.set_mesh(mesh):
        graphdef, state, init = describe_state(model, learner, mesh)
        loss_fn = by_plan(make_supervised_loss(graphdef, loss))
        dropout = None if drops_out(model) is None else seed
        options: dict[str, Any] = {"compiler_options": compiler_options, "dropout": dropout}
        step = make_train_step(loss_fn, learner, microbatches, like=state, **options)
        return TrainProgram(step, state, graphdef, init)


def drops_out(model: ConfigBase) -> str | None:
    """Return the path of a layer of a model that drops out in training, None where nothing does."""
    return next((path for path, node in walk_configs(model) if getattr(node, "dropout", 0)), None)


def describe_state(
    model: ConfigBase, learner: Learner, mesh: Mesh, field: str = "model"
) -> tuple[nnx.GraphDef[Any], State, Callable[[jax.Array], Params]]:
    """Return the model's graph definition, the train state on the mesh, and key -> parameters; the mesh is set.

    Raises:
        UserError: the model does not fit the mesh; names the layer, by its path from `field`.
    """
    graphdef, state, init = describe_params(model, mesh, field, lambda params: init_state(params, learner))
    return graphdef, learner.placed_state(state), init


def describe_params(
    model: ConfigBase, mesh: Mesh, field: str = "model", state: Callable[[Params], Any] = lambda params: params
) -> tuple[nnx.GraphDef[Any], Any, Callable[[jax.Array], Params]]:
    """Return what `describe_state` does, of the parameters alone, or of what `state` makes of them."""
    graphdefs: list[nnx.GraphDef[Any]] = []

    def init(key: jax.Array) -> Params:
        graphdef, params = split(model.build(rngs=nnx.Rngs(key)))
        graphdefs.append(graphdef)  # static: tracing is all that it needs
        return params

    # The key is made within: the mesh may be one that can hold no array.
    with errors_at(field, model):
        described = to_named_sharding(jax.eval_shape(lambda: state(init(jax.random.key(0)))), mesh)
    return graphdefs[0], described, init


def describe_batch(cfg: SupervisedInput.Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a packed batch of `SupervisedInput` as `shard_batch` shards it; the mesh is set."""
    shape = (cfg.batch_size, cfg.seq_len)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, batch_partition(shape, name)))
        for name, dtype in cfg.dtypes.items()
    }


def check_rows(cfg: SupervisedInput.Config, mesh: Mesh, microbatches: int, parts: str = "microbatches") -> None:
    """Refuse a batch whose rows, or whose tokens in a row, do not divide into microbatches over the mesh.

    `parts`: the name of the microbatches in the error.

    Raises:
        ConfigError: naming the field.
    """
    axes = mesh_axes("batch")
    shards = math.prod(mesh.shape[axis] for axis in axes)
    multiple = shards * microbatches
    expected = f"a multiple of {multiple}: {microbatches} {parts}, each sharded over {shards} parts of the mesh"
    cfg.require("batch_size", cfg.batch_size % multiple == 0, f"{expected} ({' x '.join(axes)})")
    if (devices := math.prod(mesh.shape[axis] for axis in mesh_axes("length"))) > 1:
        fits = cfg.seq_len % (2 * devices) == 0
        cfg.require("seq_len", fits, f"a multiple of {2 * devices}: two parts for each device of the sequence axis")


def check_length(model: ConfigBase, length: int, field: str, root: str = "model") -> None:
    """Refuse sequences longer than the model's positions, rotary or learned; LongRoPE has other frequencies for them.

    Raises:
        ConfigError: naming the field and the position embedding's path, from `root`, that of the model.
    """
    for path, rope in _limited(model):
        if length > rope.max_length:
            place = f"{root}.{path}.max_length"
            expected = "set max_length (and a scaling of the frequencies) if the model is to be stretched"
            if isinstance(rope, PositionedEmbedding.Config):
                expected = "a model with more learned positions"
            elif isinstance(rope.scaling, LongRopeScaling.Config):
                expected = f"{place}={length}, with which sequences of every length have LongRoPE's long factors"
            raise ConfigError(
                f"{field} is {length}, but {place} is {rope.max_length}; expected at most that, or {expected}", place
            )


def most_positions(model: ConfigBase) -> int | None:
    """Return the length of the longest sequences that `check_length` takes; None: any length."""
    return min((positions.max_length for _, positions in _limited(model)), default=None)


def _limited(model: ConfigBase) -> Iterator[tuple[str, Any]]:
    """Yield configs of positions, rotary or learned, that have a `max_length`, with their paths."""
    for path, positions in walk_configs(model):
        if isinstance(positions, Rope.Config | PositionedEmbedding.Config) and positions.max_length is not None:
            yield path, positions


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The fields of an experiment that change the memory and speed of its train step, but not its result."""

    model: Any  # config of the model that is trained
    model_field: str  # path of that config in the experiment's
    prefix: str  # path of the trainer's config in the experiment's, with a dot; empty if they are one
    mesh: Mapping[str, int]  # axis -> size, as configured
    rules: AxisRules  # the experiment's axis rules
    microbatches: int  # microbatches as configured
    rows: int  # rows of a batch
    length: int  # tokens of a row
    row_multiple: int | None = None  # the number of which a batch's rows are a multiple; None: there is no such field
    chunked: bool = True  # False if the logits could still be computed in chunks by setting `loss.chunks`

    def batch_shards(self, mesh: Mapping[str, int]) -> int:
        """Return over how many devices such a mesh shards the rows of a batch."""
        return math.prod(mesh.get(name, 1) for name in mesh_axes("batch", self.rules))

    def edits(self, mesh: Mapping[str, int], remat: str, microbatches: int) -> dict[str, Any]:
        """Return the edits of the experiment's config, path -> value, for another way to run the step."""
        found: dict[str, Any] = {f"{self.prefix}mesh": mesh, f"{self.prefix}microbatches": microbatches}
        if self.row_multiple is not None:
            rows = self.batch_shards(mesh) * microbatches
            found[f"{self.prefix}row_multiple"] = math.lcm(rows, self.row_multiple)
        return found | {f"{self.model_field}.remat": remat}


def trainer_programs(cfg: Any, devices: Sequence[Any]) -> Programs:
    """Return the programs of a trainer on these devices: train and eval."""
    mesh = partial(make_mesh, cfg.mesh, devices, slices=cfg.slices)
    return {"train": lambda: _train(cfg, mesh()), "eval": lambda: _eval(cfg, mesh())}


def trainer_tuning(cfg: Any) -> Tuning:
    """Return the fields that tune a trainer's step."""
    return Tuning(
        model=cfg.model,
        model_field="model",
        prefix="",
        mesh=cfg.mesh,
        rules=cfg.axis_rules,
        microbatches=cfg.microbatches,
        rows=cfg.input.batch_size,
        length=cfg.input.seq_len,
        chunked=getattr(cfg.loss, "chunks", 2) > 1,  # scores need no chunks
    )


def rows_flops(model: ConfigBase[Any], rows: int, length: int, *, backward: bool = False) -> tuple[float, str]:
    """Return the FLOPs of a pass over unpacked rows, and what they are of."""
    passes = "forward and backward pass" if backward else "forward pass"
    flops = model_flops(model, rows_workload(rows, length), backward=backward)
    return flops, f"{passes} of {rows} rows of {length} tokens, unpacked, causal half"


def traced(step: Any, mesh: Mesh, rules: AxisRules, *args: Any, **keywords: Any) -> Any:
    """Return the trace of a jitted step, with the mesh and its rules in force."""
    with use_mesh(mesh, rules):
        return step.trace(*args, **keywords)


def _train(cfg: Any, mesh: Mesh) -> Program:
    program = cfg.program(mesh)
    rows, length = cfg.input.batch_size, cfg.input.seq_len
    with use_mesh(mesh, cfg.axis_rules):
        batch = cfg.batch(mesh)
    trace = partial(traced, program.step, mesh, cfg.axis_rules, program.state, batch)
    return Program("train", mesh, trace, rows, length, *rows_flops(cfg.model, rows, length, backward=True))


def _eval(cfg: Any, mesh: Mesh) -> Program:
    inputs = next((e.input for e in cfg.evaluators if isinstance(e, LossEvaluator.Config)), cfg.input)
    check_length(cfg.model, inputs.seq_len, "the evaluator's input.seq_len")
    program = cfg.program(mesh)
    with use_mesh(mesh, cfg.axis_rules):
        check_rows(inputs, mesh, 1)
        batch = describe_scored(describe_batch(inputs, mesh), cfg.loss.scores)
        step = eval_step(program.graphdef, cfg.loss.build())
    rows, length = inputs.batch_size, inputs.seq_len
    trace = partial(traced, step, mesh, cfg.axis_rules, program.state["params"], batch)
    return Program("eval", mesh, trace, rows, length, *rows_flops(cfg.model, rows, length))
