"""A table of docs/benchmarks/exact-numerics.md: what they cost an engine on several TPUs, by the compiler's estimate.

    python -m tests.studies.exact_numerics v6e:2x2 v5p:2x2x1 --model Qwen3-8B

All devices of a topology share the engine by `tensor`. Each line is of one device. "Float sums" are the all-reduces and
reduce-scatters of the compiled text that add floats, whose order is the compiler's: exact numerics have none. What is
left of all-reduces adds integers, which has no order. Needs libtpu (the extra `aot`) and no TPU.
"""

from typing import Any, NamedTuple

import click

from mesh.cost.ahead_of_time import compile_steps
from mesh.cost.collectives import collectives
from mesh.cost.hlo import HloModule
from mesh.cost.roofline import estimate
from mesh.topology import parse_topology, topology_devices
from models.catalog import published_model
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import engine_dispatches

_SIZES: dict[str, Any] = {"max_num_seqs": 64, "max_prompt_tokens": 1024, "max_new_tokens": 1024, "page_size": 64}
_ADDING = ("all-reduce", "reduce-scatter")


class Program(NamedTuple):
    """One compiled dispatch, of one device.

    Attributes:
        name: kind of dispatch, and its rows.
        hbm_s: seconds of all bytes between HBM and chip at full bandwidth.
        estimated_s: seconds by the compiler's estimate (mesh/cost/roofline.py).
        received: bytes received from other devices.
        temporary: bytes of temporary memory.
        float_sums: sums of floats over devices whose order is the compiler's.
        sums: all operations between devices that add or compare numbers.
    """

    name: str
    hbm_s: float
    estimated_s: float
    received: float
    temporary: int
    float_sums: int
    sums: int


def compile_programs(cfg: RolloutEngine.Config, topology: str, kinds: tuple[str, ...]) -> list[Program]:
    """Return the first of the largest dispatches of each of these kinds, compiled for a topology; those that fit."""
    found = parse_topology(topology)
    mesh, dispatches = engine_dispatches(cfg, topology_devices(found))
    chosen = [next(one for one in dispatches if one.kind == kind) for kind in kinds]
    programs = []
    for one in compile_steps([(each.name, each.trace) for each in chosen], mesh, found):
        if one.hlo is None or one.memory is None:
            continue
        moved = collectives(one.hlo, mesh)
        flops = {"flops": one.products.xla, "kernel_flops": one.products.kernels}
        time = estimate(one.hlo, mesh, found, moved, **flops)
        received = sum(each.times * each.bytes for each in moved)
        sums = reductions(one.hlo)
        programs.append(
            Program(one.name, time.hbm, time.step, received, one.memory.temp, sums.count("add of floats"), len(sums))
        )
    return programs


def reductions(program: HloModule) -> list[str]:
    """Return what each all-reduce and reduce-scatter of a program does, such as "add of floats"."""
    found = []
    for lines in program.computations.values():
        for line in lines:
            if line.opcode.removesuffix("-start") not in _ADDING:
                continue
            floats = any(array.dtype[0] in "bf" for array in line.arrays)
            does = {one.opcode for one in program.computations[line.called["to_apply"]]} & {"add", "maximum", "minimum"}
            found.append(f"{'/'.join(sorted(does))} of {'floats' if floats else 'integers'}")
    return found


@click.command()
@click.argument("topologies", nargs=-1, required=True)
@click.option("--model", default="Qwen3-8B", show_default=True, help="A name of `axl models list`.")
@click.option("--layers", type=click.IntRange(1), help="Layers, where not all of the model's are to be compiled.")
def main(topologies: tuple[str, ...], model: str, layers: int | None) -> None:
    """Compile prefill and decoding with default and with exact numerics, and print a table in Markdown."""
    policy = published_model(model)
    policy = policy if layers is None else policy.clone(num_layers=layers)
    print("| chips | program | numerics | bytes, ms | estimate, ms | received, MB | temporary, MB | float sums |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for topology in topologies:
        for numerics in ("default", "exact"):
            mesh = {"tensor": parse_topology(topology).devices}
            cfg = RolloutEngine.Config(model=policy.clone(numerics=numerics), stop_tokens=(), mesh=mesh, **_SIZES)
            for one in compile_programs(cfg, topology, ("prefill", "decode")):
                times = f"{1e3 * one.hbm_s:,.1f} | {1e3 * one.estimated_s:,.1f}"
                sizes = f"{one.received / 1e6:,.1f} | {one.temporary / 1e6:,.0f}"
                print(f"| {topology} | {one.name} | {numerics} | {times} | {sizes} | {one.float_sums} |", flush=True)


if __name__ == "__main__":
    main()
