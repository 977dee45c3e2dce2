"""Golden texts of the compiled experiments, compared by tests/experiments/test_golden_compiles.py.

    python -m tests.golden.compiles [NAMES]     # experiments or files; without names: the small ones
    python -m tests.golden.compiles --full      # all: a minute and a half of CPU time for a large model

A change of memory, of a collective or of how an array is sharded shows as a changed line. Look at the difference, then
commit it. Small ones are experiments of reduced sizes: what a compilation costs goes with the width of the model, not
with its depth, its rows or its devices. They have the mesh, the rules, the layers and the learner of the experiment.
Needs libtpu (the extra `aot`).
"""

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from mesh.errors import UserError, did_you_mean
from mesh.topology import compiler_version, parse_topology, prepare_compiler
from tools.aot.report import Report
from tools.aot.run import described

DIRECTORY = Path(__file__).parents[1] / "experiments" / "compiled"
COMMAND = "python -m tests.golden.compiles"
_MEMORY = ("arguments", "output", "alias", "temp", "host", "peak")
_VERSIONS = "compiled by "


class Case(NamedTuple):
    """One train step to compile.

    Attributes:
        experiment: a registered name.
        topology: as it is sold.
        sets: edits, after the mesh rules.
        small: True: an experiment of reduced sizes; else it is the experiment as it ships, on that mesh.
    """

    experiment: str
    topology: str
    sets: tuple[str, ...] = ()
    small: bool = False

    @property
    def name(self) -> str:
        """The name of its file, without the ending."""
        return f"{self.experiment}.{self.topology}{'.small' if self.small else ''}"


def _narrow(model: str, *, heads: int = 8, experts: bool = False) -> tuple[str, ...]:
    """Return edits that make a model narrow, of few layers, and change nothing else."""
    feed_forward = ("num_experts=16", "experts.hidden=128") if experts else ("hidden=256",)
    return (
        f"{model}.dim=128",
        f"{model}.num_layers=3",
        f"{model}.vocab_size=512",
        f"{model}.block.attention.num_heads={heads}",
        f"{model}.block.attention.num_kv_heads=4",
        *(f"{model}.block.feed_forward.{edit}" for edit in feed_forward),
    )


def _small(experiment: str, topology: str, rows: int, **shape: Any) -> Case:
    """Return the case of a supervised experiment with a narrow model and short rows."""
    edits = (*_narrow("model", **shape), "input.seq_len=256", f"input.batch_size={rows}")
    return Case(experiment, topology, edits, small=True)


_RL = (
    "prompts_per_step=16",
    "samples_per_prompt=4",
    "evaluation=None",  # its pass@8 wants more samples
    "max_prompt_tokens=257",
    "max_new_tokens=64",
    "trainer.row_multiple=512",
    "trainer.packing.lengths=(128, 64)",
    "trainer.chunks=4",
)

CASES = (
    _small("llama2_7b", "v5p-32", 64, heads=4),
    _small("llama2_70b", "v6e-128", 512),
    _small("llama31_8b", "v6e-16", 128),
    _small("qwen25_32b", "v6e-64", 512),
    _small("qwen3_30b_a3b", "v5p-32", 512, experts=True),
    Case("qwq_32b_rl", "v5p-1024", (*_narrow("policy"), *_RL), small=True),
    Case("qwen25_0_5b_rl", "v5e-4", (*_narrow("policy"), *_RL), small=True),
    Case("qwen25_1_5b_rl", "v6e-1", (*_narrow("policy"), *_RL), small=True),
    Case("demo", "v6e-4", ("trainer.mesh={'data': -1}",)),
    Case("llama2_7b", "v5p-32"),
)


def versions() -> str:
    """Return the line that says by which versions a text was made."""
    import jax

    return f"{_VERSIONS}libtpu {compiler_version() or 'of unknown version'}, jax {jax.__version__}"


def stored_versions(text: str) -> str:
    """Return that line of a stored text."""
    return next((line for line in text.splitlines() if line.startswith(_VERSIONS)), "of unknown versions")


def compiled_text(case: Case) -> str:
    """Return the text of a case: a command that shows more, the versions, what the mesh rules set, and the facts."""
    from axlearn_like.config import to_text
    from experiments.registry import get
    from tools.aot.run import compile_experiment, load_for

    topology = parse_topology(case.topology)
    ruled = to_text(load_for(case.experiment, (), topology)).splitlines()
    shipped = set(to_text(get(case.experiment)).splitlines())
    report = compile_experiment(load_for(case.experiment, case.sets, topology), "train", topology).report
    words = ["axl aot", case.experiment, f"--topology {case.topology}", *(f'--set "{one}"' for one in case.sets)]
    lines = [
        " ".join(words),
        versions(),
        *(f"mesh rule {line}" for line in ruled if line not in shipped),
        *golden_lines(report),
    ]
    return "\n".join(lines) + "\n"


def golden_lines(report: Report) -> list[str]:
    """Return the facts of a report that depend on code and compiler alone, one in a line.

    Left out are times, figures of the machine, and the places of code in its files.
    """
    return [
        f"step: {report['step']}",
        f"mesh: {described(report['mesh'])}",
        f"fits: {'yes' if report['fits'] else 'no'}",
        *_memory(report),
        f"kept for the backward pass: {_size(report['kept_for_backward'])}",
        f"FLOPs of the model: {report['flops_analytic']:.6g}",
        f"FLOPs executed: {report['flops_executed']:.6g}",
        *_collectives(report),
        *(f"argument {one}" for one in report["arguments"]),
        *_largest(report),
    ]


def _memory(report: Report) -> Iterator[str]:
    if report["hbm"] is None:
        yield f"memory: {report['oom']['what']} need {_size(report['oom']['needed'])}"
        return
    for name in _MEMORY:
        yield f"memory {name}: {_size(report['hbm'][name])}"


def _collectives(report: Report) -> Iterator[str]:
    for axis, kinds in (report["collectives"] or {}).items():
        for kind, row in kinds.items():
            # Small all-reduces are joined to larger ones, not alike each time that the same program is compiled.
            times = "" if kind == "all-reduce" else f"{row['count']} times, "
            yield f"collective over {axis}, {kind}: {times}{_size(row['bytes'])} received"


def _largest(report: Report) -> Iterator[str]:
    for row in report["largest_buffers"]:
        path = row["path"] if row["what"] == "argument" else re.sub(r"\.\d+$", "", row["path"])  # the compiler's count
        yield f"large array: {_size(row['bytes'])} {row['array']} {row['what']} {path}"


def _size(count: int) -> str:
    """Format bytes to a hundredth of a MiB, below which a change is no news."""
    return f"{count / (1 << 20):,.2f} MiB"


def chosen(names: Iterable[str], full: bool) -> list[Case]:
    """Return the cases of these names, of experiments or of files; without names the small ones, or all.

    Raises:
        UserError: a name has none.
    """
    names = [name.removesuffix(".txt") for name in names]
    known = {case.name for case in CASES} | {case.experiment for case in CASES}
    for name in names:
        if name not in known:
            raise UserError(f"no experiment or file {name!r} to compile{did_you_mean(name, known)}")
    if not names:
        return [case for case in CASES if full or case.small]
    return [case for case in CASES if case.name in names or (case.experiment in names and (full or case.small))]


@click.command(help=f"Compile experiments for TPUs, and write the results to {DIRECTORY.name}/.")
@click.argument("names", nargs=-1)
@click.option("--full", is_flag=True, help="Those of full size too, which take minutes.")
def main(names: tuple[str, ...], full: bool) -> None:
    """Write the texts of the chosen cases, and delete those of cases that are gone."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prepare_compiler()
    DIRECTORY.mkdir(exist_ok=True)
    kept = {case.name for case in CASES}
    for path in DIRECTORY.glob("*.txt"):
        if path.name.removesuffix(".txt") not in kept:
            path.unlink()
    for case in chosen(names, full):
        began = time.process_time()
        (DIRECTORY / f"{case.name}.txt").write_text(compiled_text(case))
        click.echo(f"{case.name}.txt: {time.process_time() - began:.1f} CPU-s", err=True)


if __name__ == "__main__":
    main()
