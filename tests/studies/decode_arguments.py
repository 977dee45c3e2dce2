"""Bytes that the decode program of Llama-3.1-8B takes, with weights and pages of eight bits and without.

    python -m tests.studies.decode_arguments v5p:1x1x1

Compiled ahead of time for the topology, all devices of which share the engine: 32 sequences of 8,192 tokens, all in
the pages at full length. Bytes are the compiler's, of one device.
"""

from typing import Any

import click

from axlearn_like.layers.wrappers.quantised import StoredWeights
from mesh.cost.ahead_of_time import compile_step
from mesh.topology import parse_topology, topology_devices
from models.llama import llama
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import engine_dispatches

ENGINES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 keys and values": {"kv_cache_dtype": "int8"},
    "int8 weights and vocabulary": {"weights": StoredWeights.Config(vocabulary="int8")},
    "all of these": {"weights": StoredWeights.Config(vocabulary="int8"), "kv_cache_dtype": "int8"},
}
SIZES: dict[str, Any] = {"max_num_seqs": 32, "max_prompt_tokens": 4096, "max_new_tokens": 4096, "page_size": 64}


@click.command()
@click.argument("topology")
def main(topology: str) -> None:
    """Print a table."""
    found, first = parse_topology(topology), None
    print("| engine | arguments | ratio | in place | temporaries |\n|---|---:|---:|---:|---:|")
    for name, changes in ENGINES.items():
        cfg = RolloutEngine.Config(model=llama("Llama-3.1-8B"), stop_tokens=(), **SIZES, **changes)
        mesh, dispatches = engine_dispatches(cfg, topology_devices(found))
        plain = next(one for one in dispatches if one.kind == "decode")
        memory = compile_step(plain.name, plain.trace, mesh, found).memory
        if memory is None:
            print(f"| {name} | does not fit | | | |", flush=True)
            continue
        first = memory.arguments if first is None else first
        sizes = [memory.arguments, memory.alias, memory.temp]
        taken, kept, beside = (f"{size / 1e9:.3f} GB" for size in sizes)
        print(f"| {name} | {taken} | {sizes[0] / first:.3f} | {kept} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
