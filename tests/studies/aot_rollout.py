"""The table of docs/benchmarks/tpu-rollout.md: the engine's programs for a model on TPUs that are not there.

    python -m tests.studies.aot_rollout v5p:2x2x1 v6e:2x4

Needs libtpu (the extra `aot`), no TPU, and about 4 GB of memory.
"""

import os
import platform
import sys
from typing import Any

import click

from mesh import UserError
from mesh.topology import Topology, compiler_version, parse_topology

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("topologies", nargs=-1, required=True)
@click.option("--model", default="QwQ-32B", show_default=True, help="A name of `axl models list`.")
@click.option("--max-prompt-tokens", default=4096, show_default=True, type=_POSITIVE)
@click.option("--max-new-tokens", default=12_288, show_default=True, type=_POSITIVE)
@click.option("--max-num-seqs", default=64, show_default=True, type=_POSITIVE)
@click.option("--page-size", default=16, show_default=True, type=_POSITIVE)
@click.option(
    "--experts",
    default=1,
    show_default=True,
    type=_POSITIVE,
    help="Devices over which experts lie; over the rest, tensor.",
)
@click.option("--int8", is_flag=True, help="Engines hold the matrices of blocks as int8 (`StoredWeights`).")
def main(
    topologies: tuple[str, ...],
    model: str,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_num_seqs: int,
    page_size: int,
    experts: int,
    int8: bool,
) -> None:
    """Compile every kind of dispatch for each of TOPOLOGIES and print what it needs, as Markdown."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # else jax would look for the TPU
    import flax
    import jax

    from axlearn_like.layers.wrappers.quantised import StoredWeights
    from models.catalog import published_model
    from rl.rollout.engine import RolloutEngine

    versions = f"jax {jax.__version__}, flax {flax.__version__}, libtpu {compiler_version()}"
    print(f"{model}; {versions}, Python {platform.python_version()}\n")
    cfg = RolloutEngine.Config(
        model=published_model(model),
        stop_tokens=(0,),
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_num_seqs=max_num_seqs,
        page_size=page_size,
        weights=StoredWeights.Config() if int8 else None,
    )
    meshes = [engine_mesh(model, cfg.model, topology, experts) for topology in topologies]
    for topology, mesh in zip(topologies, meshes, strict=True):
        _report(cfg.clone(mesh=mesh), topology)


def engine_mesh(name: str, model: Any, topology: str, experts: int) -> dict[str, int]:
    """Return the mesh of an engine (UserError: the experts do not lie over so many of its devices)."""
    from axlearn_like.config import walk_configs
    from axlearn_like.layers.moe.layer import MoE

    devices = parse_topology(topology).devices
    if experts > 1 and not any(isinstance(layer, MoE.Config) for _, layer in walk_configs(model)):
        raise UserError(f"--experts {experts}: expected 1, for {name} has no experts")
    if devices % experts:
        raise UserError(f"--experts {experts}: expected a divisor of the {devices} devices of {topology}")
    return {"tensor": devices // experts, "expert": experts}


def _report(cfg: Any, topology: str) -> None:
    from mesh.cost.ahead_of_time import memory_per_device
    from mesh.topology import parse_topology
    from tests.rl.rollout.model_runner.compiled_engine import compile_engine, largest_pool

    pages = largest_pool(cfg, topology)
    steps = compile_engine(cfg.clone(pages=pages), topology)
    weights, pool = steps[0].weights, steps[0].pool
    alone = pages + weights // (pool // pages)
    print(f"### {topology}\n")
    memory = memory_per_device(parse_topology(topology))
    print(f"GiB per device: {_gib(memory)} to be had, weights {_gib(weights)}, cache {_gib(pool)}.")
    print(f"Tokens in the cache: {steps[0].tokens:,} beside two versions of the weights", end=" ")
    print(f"({alone * cfg.page_size:,} beside one).\n")
    print("| program | arguments | outputs | of these in place | temporary | code, MiB | moved | compiled in, s |")
    print("|---|---|---|---|---|---|---|---|")
    for step in steps:
        sizes = map(_gib, (step.arguments, step.outputs, step.aliased, step.temporary))
        code, moved = f"{step.code / (1 << 20):.1f}", f"{step.moved / (1 << 30):,.1f}"
        print(f"| {step.name} | {' | '.join(sizes)} | {code} | {moved} | {step.seconds:.1f} |")
    print(f"\n{bound(cfg, parse_topology(topology), weights, pool // steps[0].tokens)}\n")


def bound(cfg: Any, topology: Topology, weights: int, token: int) -> str:
    """Return the least time of a decoding step, as Markdown: it reads the weights, and all keys and values of its rows.

    Args:
        cfg: engine; all its rows are decoded.
        topology: slice, whose bandwidth counts.
        weights: bytes of a device. The table of an untied embedding, of which a step reads a few rows, is left out.
        token: bytes that the cache has of a token on a device.
    """
    model, rows = cfg.model, cfg.max_num_seqs
    if model.head is not None:
        weights -= model.vocab_size * model.dim * 2 // (cfg.mesh.get("tensor") or topology.devices)
    bandwidth = topology.generation.per_device(topology.generation.hbm_bandwidth)
    lines = [
        f"Bounds by bandwidth, not speeds: {weights / 1e9:.2f} GB of weights and {token:,} bytes a token of {rows} "
        f"rows, read at {bandwidth / 1e9:,.0f} GB/s.\n",
        "| tokens of a row | GB of a device | ms of a step, at least | tokens a second, at most |",
        "|---|---|---|---|",
    ]
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    for length in sorted({min(n, longest) for n in (1024, 4096, longest)}):
        size = weights + rows * length * token
        lines.append(
            f"| {length:,} | {size / 1e9:.2f} | {1e3 * size / bandwidth:.2f} | {rows * bandwidth / size:,.0f} |"
        )
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3f}"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
