"""Programs of a supervised experiment, to be compiled, and the fields that tune its train step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from jax.sharding import Mesh

from axlearn_like.config import ConfigBase
from axlearn_like.operations.flops import model_flops, rows_workload
from axlearn_like.training.alignment.scoring import describe_scored
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.losses import eval_step
from axlearn_like.training.program import check_length, check_rows, describe_batch
from mesh import make_mesh
from mesh.cost.program import Program, Programs
from mesh.rules import AxisRules, mesh_axes, use_mesh


class TrainerConfig(Protocol):
    """The fields of a supervised trainer's config that say what it compiles."""

    model: Any
    input: Any
    loss: Any
    evaluators: Any
    mesh: Any
    slices: Any
    axis_rules: Any
    microbatches: int

    def program(self, mesh: Mesh) -> Any:
        """Return the trainer's program on a mesh."""

    def batch(self, mesh: Mesh) -> dict[str, Any]:
        """Return the described batch that the program's step takes."""
        ...


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The fields of an experiment that change the memory and speed of its train step, but not its result.

    Attributes:
        model: config of the model that is trained.
        model_field: path of that config in the experiment's.
        prefix: path of the trainer's config in the experiment's, with a dot; empty if they are one.
        mesh: axis -> size, as configured.
        rules: the experiment's axis rules.
        microbatches: as configured.
        rows: rows of a batch.
        length: tokens of a row.
        row_multiple: the number of which a batch's rows are a multiple; None: there is no such field.
        chunked: False if the logits could still be computed in chunks by setting `loss.chunks`.
    """

    model: Any
    model_field: str
    prefix: str
    mesh: Mapping[str, int]
    rules: AxisRules
    microbatches: int
    rows: int
    length: int
    row_multiple: int | None = None
    chunked: bool = True

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


def trainer_programs(cfg: TrainerConfig, devices: Sequence[Any]) -> Programs:
    """Return the programs of a trainer on these devices: train and eval."""
    mesh = partial(make_mesh, cfg.mesh, devices, slices=cfg.slices)
    return {"train": lambda: _train(cfg, mesh()), "eval": lambda: _eval(cfg, mesh())}


def trainer_tuning(cfg: TrainerConfig) -> Tuning:
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


def _train(cfg: TrainerConfig, mesh: Mesh) -> Program:
    program = cfg.program(mesh)
    rows, length = cfg.input.batch_size, cfg.input.seq_len
    with use_mesh(mesh, cfg.axis_rules):
        batch = cfg.batch(mesh)
    trace = partial(traced, program.step, mesh, cfg.axis_rules, program.state, batch)
    return Program("train", mesh, trace, rows, length, *rows_flops(cfg.model, rows, length, backward=True))


def _eval(cfg: TrainerConfig, mesh: Mesh) -> Program:
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
