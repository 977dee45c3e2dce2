"""Cycles of the policy head's kernels by the compiler's own simulation, on a small job: a process for each topology.

    python -m tools.bench.kernels.static_cycles v6e:2x2

prints JSON. The simulation knows loops of constant length alone, which leaves out paged and cascade attention and
splash, whose loops depend on the data; it runs through every bundle, so the job has a few tiles. Compared with times of
matrix products that are printed in JAX's own documentation (v5e), it was 4 to 5 per cent low where the matrix unit is
the limit, and up to 38 per cent high in small blocks. It knows nothing of contention for memory, or of dispatch.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.policy_head.statistics import policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules
from mesh import make_mesh
from mesh.topology import parse_topology, topology_devices

TOKENS, WIDTH, WORDS = 512, 2048, 1024
_KERNEL = re.compile(r"%(\w+?)(?:\.\d+)? = .*tpu_custom_call.*\"estimated_cycles\":\"(\d+)\"")


def profile_flags(folder: Path) -> dict[str, str]:
    """Return the environment with which libtpu simulates kernels while it compiles; it writes into a folder."""
    return {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"}


def cycles(topology: str) -> dict[str, Any]:
    """Return the cycles of each kernel, and those of its matrix products at the peak of the chip."""
    found = parse_topology(topology)
    mesh = make_mesh({}, topology_devices(found)[:1])

    def loss(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        sums = policy_statistics(x, weight, targets, HeadRules(tile=512), kernel=True)
        return jnp.sum(sums.logprob) + jnp.sum(sums.entropy)

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P())
        kinds = [((TOKENS, WIDTH), jnp.bfloat16), ((WIDTH, WORDS), jnp.bfloat16), ((TOKENS,), jnp.int32)]
        head = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in kinds]
        text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*head).compile().as_text() or ""
    product = (
        2 * TOKENS * WIDTH * WORDS / (found.generation.per_device(found.generation.flops) / found.generation.clock)
    )
    # Each backward kernel computes the logits again, and multiplies once more.
    products = {"policy_head_forward": 1, "d_x": 2, "d_weight": 2}
    return {
        name: {"cycles": int(count), "matmul_cycles": round(products[name] * product)}
        for name, count in _KERNEL.findall(text)
        if name in products
    }


if __name__ == "__main__":
    print(json.dumps(cycles(sys.argv[1])))
