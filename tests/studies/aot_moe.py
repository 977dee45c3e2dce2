"""The table of docs/concepts/moe.md: one mixture-of-experts layer, forwards and backwards, on TPUs that are not there.

    python -m tests.studies.aot_moe v5p:2x2x1 v6e:2x2 --mesh expert=2,fsdp=2

Needs libtpu (the extra `aot`), no TPU, a few minutes for each line, and about 4 GB of memory.
"""

import os
import re
import time
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.moe.layer import MoE
from mesh import make_mesh, partition, to_named_sharding
from mesh.topology import parse_topology, topology_devices
from models.moe import moe

COLLECTIVES = ("ragged-all-to-all", "all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")


class CompiledLayer(NamedTuple):
    """The compiler's plan for one device.

    Attributes:
        temporary: bytes beside arguments and results.
        flops: FLOPs of the grouped products, those for all places, rounds beyond the first included.
        collectives: kind -> how many there are.
        seconds: seconds to compile.
    """

    temporary: int
    flops: float
    collectives: dict[str, int]
    seconds: float


def compile_layer(cfg: MoE.Config, topology: str, shape: dict[str, int], *, length: int) -> CompiledLayer:
    """Compile loss and gradients of a layer, bfloat16 activations, one row of `length` tokens per device.

    Args:
        cfg: with `dim` set.
        topology: generation and chips, e.g. "v5p:2x2x1".
        shape: shape of the mesh.
        length: tokens per device.

    Raises:
        UserError: libtpu is missing, or the mesh does not fit the topology.
    """
    devices = topology_devices(parse_topology(topology))
    mesh = make_mesh(shape, devices)
    with jax.set_mesh(mesh):
        graphdef, abstract = split(build_abstract(cfg))
        where = NamedSharding(mesh, partition("batch", None, None) or PartitionSpec())
        x = jax.ShapeDtypeStruct((len(devices), length, cfg.dim), jnp.bfloat16, sharding=where)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            y, aux = bind(graphdef, params)(x)
            return jnp.mean(y.astype(jnp.float32) ** 2) + sum(aux.losses.values(), jnp.zeros(()))

        start = time.perf_counter()
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(to_named_sharding(abstract, mesh), x).compile()
        seconds = time.perf_counter() - start
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    flops = (compiled.cost_analysis() or {})["flops"]
    return CompiledLayer(memory.temp_size_in_bytes, flops, {k: n for k, n in found.items() if n}, seconds)


@click.command()
@click.argument("topologies", nargs=-1, required=True)
@click.option("--model", default="Qwen3-30B-A3B", show_default=True, help="A name that models.moe knows.")
@click.option("--mesh", "shape", default="expert=2,fsdp=2", show_default=True)
@click.option("--length", default=4096, show_default=True, help="Tokens per device.")
def main(topologies: tuple[str, ...], model: str, shape: str, length: int) -> None:
    """Compile a layer of MODEL for each of TOPOLOGIES and print what it needs, as Markdown."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # else jax would look for the TPU
    decoder = moe(model)
    assert isinstance(decoder.block, Block.Config)
    cfg: ConfigBase[Any] = decoder.block.feed_forward.clone(dim=decoder.dim)
    assert isinstance(cfg, MoE.Config)
    axes = {name: int(size) for name, size in (part.split("=") for part in shape.split(","))}
    wide = cfg.clone(experts=cfg.experts.clone(capacity_factor=float(axes.get("expert", 1))))
    print("| topology | dispatch | temporary, MiB | GFLOP | collectives | compiled in, s |\n|---|---|---|---|---|---|")
    for topology in topologies:
        for name, variant in {"rounds of 1.25 x the mean": cfg, "all in one round": wide}.items():
            done = compile_layer(variant, topology, axes, length=length)
            talk = ", ".join(f"{count} {kind}" for kind, count in done.collectives.items())
            print(
                f"| {topology} | {name} | {done.temporary / 2**20:,.0f} | {done.flops / 1e9:,.0f} | {talk} | "
                f"{done.seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
