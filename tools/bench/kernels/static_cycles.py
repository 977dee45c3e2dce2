"""Cycles of the policy head's kernels by the compiler's own simulation, on a small job: a process for each topology.

    python -m tools.bench.kernels.static_cycles v6e:2x2

prints JSON. The simulation knows loops of constant length alone, which leaves out paged and cascade attention and
splash, whose loops depend on the data; it runs through every bundle, so the jobs have a few tiles. Compared with times
of matrix products that are printed in JAX's own documentation (v5e), it was 4 to 5 per cent low where the matrix unit
is the limit, and up to 38 per cent high in small blocks. It knows nothing of contention for memory, or of dispatch.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mesh import make_mesh
from mesh.topology import parse_topology, topology_devices
from tools.bench.kernels.compiled import tiled_head, whole_head
from tools.bench.kernels.fixed_order import entry_cycles

TOKENS, WIDTH, WORDS = 512, 2048, (1024, 2048)
_KERNEL = re.compile(r"%(\w+?)(?:\.\d+)? = .*tpu_custom_call.*\"estimated_cycles\":\"(\d+)\"")


def profile_flags(folder: Path) -> dict[str, str]:
    """Return the environment with which libtpu simulates kernels while it compiles; it writes into a folder."""
    return {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"}


def cycles(topology: str) -> dict[str, Any]:
    """Return the cycles of each kernel and of whole logits by XLA, and of their products at the peak of the chip.

    `head_cycles_a_word`: what each word of the head adds to all operations of a forward and backward pass, by kernels
    and by XLA, from the larger and the smaller job: with 151,936 words little else counts.
    """
    found = parse_topology(topology)
    rate = found.generation.per_device(found.generation.flops) / found.generation.clock
    less, more = (_heads(topology_devices(found)[0], words) for words in WORDS)
    added = {name: (more[name][0] - less[name][0]) / (WORDS[1] - WORDS[0]) for name in less}
    # Each backward kernel computes the logits again, and multiplies once more. XLA makes three products.
    products = {"policy_head_forward": 1, "d_x": 2, "d_weight": 2}
    figures = {name: (int(count), products[name]) for name, count in _KERNEL.findall(more["kernel"][1])}
    figures |= {"head_kernel": (more["kernel"][0], sum(products.values())), "head_whole": (more["whole"][0], 3)}
    product = 2 * TOKENS * WIDTH * WORDS[1] / rate
    described = {name: {"cycles": n, "matmul_cycles": round(count * product)} for name, (n, count) in figures.items()}
    return described | {"head_cycles_a_word": added}


def _heads(device: Any, words: int) -> dict[str, tuple[int, str]]:
    """Return the cycles of a head of so many words, and its compiled program, by the kernels and by whole logits."""
    mesh = make_mesh({}, [device])
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P())
        kinds = [((TOKENS, WIDTH), jnp.bfloat16), ((WIDTH, words), jnp.bfloat16), ((TOKENS,), jnp.int32)]
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in kinds]
        found: dict[str, tuple[int, str]] = {}
        for name, loss in (("kernel", tiled_head(kernel=True)), ("whole", whole_head)):
            text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile().as_text() or ""
            found[name] = entry_cycles(text), text
        return found


if __name__ == "__main__":
    print(json.dumps(cycles(sys.argv[1])))
