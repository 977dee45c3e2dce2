"""Training steps that others have published, beside the estimates of `axl aot`: docs/benchmarks/published.md.

    python -m tests.studies.published docs/figures/published.json            # the table
    python -m tests.studies.published docs/figures/published.json --compile  # what is not in the file yet; minutes each

The rule, which was fixed before any of these steps but the first two was compiled here. Points: every step on TPUs in
table 3 of AXLearn's paper (arXiv 2507.05411 v3), every bfloat16 step of MaxText's list of optimised models
(docs/reference/models/tiering.md, with the times of the recipes that it links), and every time of a model of version 2
that stands in AXLearn's fuji.py, of models that `models/` has. Program: our own train step with the published rows,
length, recomputation and gradient accumulation, parameters sharded over as many chips as there, on v5p at most 64
(experiments/pretraining.py says why). Estimate: `estimated_step_s` of the report, the same for all points.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import click

from axlearn_like.training.trainer import Trainer
from mesh.generations import GENERATIONS
from mesh.topology import parse_topology, prepare_compiler

Names = Mapping[str, Literal["save", "offload"]]
_KEPT = ("topology", "slices", "devices", "mesh", "fits", "hbm", "rows", "length", "flops_analytic", "flops_executed",
         "flops_in_kernels", "collectives", "roofline_s", "exposed_s", "estimated_step_s", "unknown_loops", "oom",
         "versions")  # fmt: skip
_PAPER, _FUJI, _RECIPES = "AXLearn's paper", "AXLearn's fuji.py", "MaxText's recipe"
_QKV, _OUT = ("query", "key", "value"), ("attention_out", "gate", "up", "feed_forward_out")


class Step(NamedTuple):
    """A published training step.

    Attributes:
        model: a name that `models` knows.
        topology: where it ran, `slices` times.
        rows, length: rows and length of the batch.
        mesh: mesh of our program.
        remat: as published: what is saved or offloaded; or a preset.
        published: source and seconds.
        microbatches: number of microbatches that the batch was split into.
        edits: edits of the model, path -> value.
        held_out: added when the estimate was as it is now; nothing was changed after it was compiled.
    """

    model: str
    topology: str
    rows: int
    length: int
    mesh: Mapping[str, int]
    remat: Names | str
    published: tuple[tuple[str, float], ...]
    slices: int = 1
    microbatches: int = 1
    edits: Mapping[str, Any] = {}
    held_out: bool = False

    @property
    def name(self) -> str:
        """The model, the machine and the batch."""
        chips = parse_topology(self.topology, self.slices)
        where = f"{chips.slices} x " if chips.slices > 1 else ""
        return f"{self.model}, {where}{chips.sold_as}, {self.rows:,} x {self.length:,}"


def _save(*names: str) -> Names:
    return dict.fromkeys(names, "save")


def _offload(*names: str) -> Names:
    return dict.fromkeys(names, "offload")


STEPS = (
    Step(
        *("Llama-2-7B", "v5p-512", 1024, 4096, {"data": 4, "fsdp": 64}, "products"),
        ((_PAPER, 2.5), ("MaxText, by AXLearn's authors", 2.7)),
    ),
    Step(
        *("Llama-2-70B", "v5p-1024", 1024, 4096, {"data": 8, "fsdp": 64}),
        {**_save(*_QKV), **_offload("block_input")},
        ((_PAPER, 11.6), ("MaxText, by AXLearn's authors", 12.3)),
    ),
    Step(
        *("Qwen3-30B-A3B", "v5p-1024", 512, 32_768, {"data": 64, "fsdp": 8}),
        {"context": "save", **_offload(*_QKV)},
        ((_PAPER, 12.9), ("MaxText, by AXLearn's authors", 13.0)),
    ),
    Step(
        *("Llama-2-7B", "v5e-256", 1024, 4096, {"data": 4, "fsdp": 256}, _save(*_QKV, *_OUT)),
        ((_FUJI, 2.21),),
        slices=4,
    ),
    Step(
        *("Llama-2-70B", "v5e-256", 1024, 4096, {"data": 4, "fsdp": 256}, _offload(*_QKV, *_OUT)),
        ((_FUJI, 14.3736),),
        slices=4,
    ),
    Step(
        *("Llama-2-70B", "v6e-256", 1024, 4096, {"data": 4, "fsdp": 256}, _offload(*_QKV, "block_input")),
        ((_FUJI, 4.9),),
        slices=4,
    ),
    Step(
        *("Llama-2-70B", "v6e-256", 1024, 4096, {"fsdp": 256}, _offload(*_QKV, "attention_out")),
        ((_FUJI, 19.5),),
        microbatches=4,
    ),
    Step("Llama-2-70B", "v6e-256", 768, 4096, {"fsdp": 256}, _offload(*_QKV), ((_RECIPES, 9.052),)),
    Step(
        *("Llama-3.1-8B", "v6e-256", 1024, 8192, {"fsdp": 256}, _offload("block_input", *_QKV, "attention_out")),
        ((_RECIPES, 4.546),),
    ),
    Step(
        *("Llama-3.1-8B", "v6e-16", 48, 8192, {"fsdp": 16}, _offload("block_input", *_QKV, "attention_out")),
        ((_RECIPES, 3.393),),
    ),
    Step(
        *("Mistral-7B-v0.2", "v6e-8", 48, 8192, {"fsdp": 8}, _offload("block_input", *_QKV, "attention_out")),
        ((_RECIPES, 6.320),),
    ),
    Step(
        *("Llama-3.1-70B", "v6e-256", 1280, 8192, {"fsdp": 256}, _offload("block_input", *_QKV)),
        ((_RECIPES, 42.656),),
    ),
    Step(
        *("Llama-3.1-405B", "v6e-256", 512, 8192, {"data": 2, "fsdp": 256}, _offload("block_input")),
        ((_RECIPES, 54.803),),
        slices=2,
    ),
    Step(
        *("Llama-3.1-8B", "v6e-32", 96, 8192, {"fsdp": 32}, _offload("block_input", *_QKV, "attention_out")),
        ((_RECIPES, 3.495),),
        held_out=True,
    ),
    Step(
        *("Llama-3.1-70B", "v6e-64", 128, 8192, {"fsdp": 64}, _offload("block_input", *_QKV)),
        ((_RECIPES, 18.688),),
        held_out=True,
    ),
    Step(
        *("Mixtral-8x7B", "v6e-256", 3072, 4096, {"fsdp": 256}, _offload("block_input", *_QKV, "attention_out")),
        ((_RECIPES, 13.484),),
    ),
    Step(
        *("Llama-2-70B", "v5p-1024", 2048, 4096, {"data": 8, "fsdp": 64}),
        dict.fromkeys((*_QKV, "attention_out", "feed_forward_out"), "save"),
        ((_RECIPES, 4 * 4096 / 692),),
    ),
    Step(
        *("Mixtral-8x7B", "v5p-256", 36 * 128, 4096, {"data": 2, "fsdp": 64}, "everything"),
        ((_RECIPES, 36 * 4096 / 2909),),
    ),
    Step(
        *("Llama-3.1-70B", "tpu7x:4x4x4", 256, 8192, {"fsdp": 128}, _save("block_input", "context", *_QKV)),
        ((_RECIPES, 12.20),),
    ),
    Step(
        *("Llama-3.1-405B", "tpu7x:4x8x8", 1536, 8192, {"fsdp": 512}),
        {**_save("key", "value"), **_offload("block_input", "feed_forward_out")},
        ((_RECIPES, 98.34),),
    ),
    Step(
        *("Qwen3-235B-A22B", "tpu7x:4x8x8", 8192, 4096, {"fsdp": 512}, _offload("block_input")),
        ((_RECIPES, 30.87),),
    ),
)


def config(step: Step) -> Trainer.Config:
    """Return our trainer of such a step."""
    from axlearn_like.config import set_path
    from experiments.pretraining import Documents, pretraining
    from experiments.recipes.device_rules import compiler_options
    from models.catalog import published_model
    from rl.fleet.devices import parse_devices

    model = published_model(step.model)
    for path, value in step.edits.items():
        set_path(model, path, value)
    cfg = pretraining(
        model.set(remat=step.remat),
        Documents(step.rows, step.length, "-", 0),
        steps=1000,
        peak_lr=3e-4,
    ).set(mesh_rules=())
    kind = parse_devices(parse_topology(step.topology).name, "topology").name.rpartition("-")[0]
    return cfg.set(mesh=dict(step.mesh), microbatches=step.microbatches, compiler_options=compiler_options(kind))


def compiled(step: Step) -> dict[str, Any]:
    """Compile a step, and return what is kept of its report."""
    from tools.aot.run import compile_experiment

    report = compile_experiment(config(step), "train", parse_topology(step.topology, step.slices)).report
    return {name: report.get(name) for name in _KEPT}


def errors(reports: Mapping[str, Mapping[str, Any]], steps: Sequence[Step] = STEPS) -> list[float]:
    """Return, for each published time whose step was compiled and fits, estimate / published - 1."""
    return [
        reports[step.name]["estimated_step_s"] / seconds - 1
        for step in steps
        if step.name in reports and reports[step.name]["fits"]
        for _, seconds in step.published
    ]


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return all published steps as Markdown, those without an estimate included."""
    lines = [
        "| step | published by | published, s | MFU | estimate, s | error | at peak, s | HBM, s | exposed, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step in STEPS:
        one = reports.get(step.name)
        for who, seconds in step.published:
            told = f"{who}, held out" if step.held_out else who
            lines.append(f"| {step.name} | {told} | {seconds:.2f} | {_estimate(one, seconds)} |")
    for kind, steps in (("", STEPS), ("held-out ", [step for step in STEPS if step.held_out])):
        found = errors(reports, steps)
        close = sum(abs(error) <= 0.15 for error in found)
        times = sum(len(step.published) for step in steps)
        lines += ["", f"{times} {kind}published times, {len(found)} of them with an estimate, {close} within 15 %"]
        if found:
            extremes = f"the extremes {min(found):+.0%} and {max(found):+.0%}"
            lines[-1] += f"; the median error is {median(found):+.0%}, {extremes}"
        lines[-1] += "."
    return "\n".join(lines)


def _estimate(one: Mapping[str, Any] | None, seconds: float) -> str:
    if one is None:
        return "| not compiled | | | |"
    chip = GENERATIONS[one["topology"].partition(":")[0]]
    mfu = one["flops_analytic"] / one["devices"] / chip.per_device(chip.flops) / seconds
    if not one["fits"]:
        return f"{mfu:.0%} | does not fit | | | |"
    bounds, estimate = one["roofline_s"], one["estimated_step_s"]
    parts = (bounds["compute"], bounds["hbm"], one["exposed_s"])
    return f"{mfu:.0%} | {estimate:.2f} | {estimate / seconds - 1:+.0%} | " + " | ".join(
        f"{part:.2f}" for part in parts
    )


@click.command()
@click.argument("stored", type=click.Path(path_type=Path))
@click.option("--compile", "compiling", is_flag=True, help="Compile what is not stored yet, one after another.")
def main(stored: Path, compiling: bool) -> None:
    """Print the table of the reports in STORED."""
    reports: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    if compiling:
        prepare_compiler()
        for step in STEPS:
            if step.name not in reports:
                reports[step.name] = compiled(step)
                stored.write_text(json.dumps(reports, indent=1, sort_keys=True) + "\n")
                click.echo(f"{step.name}: {reports[step.name]['estimated_step_s']}", err=True)
    click.echo(table(reports))


if __name__ == "__main__":
    main()
