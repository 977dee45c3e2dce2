"""The cost of a fixed order of sums, beside XLA's product, which has none: a process for each topology.

    python -m tools.bench.kernels.fixed_order v6e:2x2

prints JSON, of a product of some rows with a [4096, 12288] matrix in bfloat16, by numbers of rows: the steps into which
XLA cuts the depth, whose sums are added up in turn, and the compiler's estimate of cycles, beside those of
`exact_matmul` (where libtpu was started to simulate kernels, see static_cycles.py) with all that goes with it. And how
many texts the kernels of fixed order have over these numbers of rows: 1 each if the batch changes nothing.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.kernels.exact.matmul import exact_matmul
from axlearn_like.kernels.exact.row_sums import exact_row_sums
from mesh import make_mesh
from mesh.topology import parse_topology, topology_devices
from tools.bench.kernels.mosaic import mosaic_texts, without_batch

DEPTH, COLUMNS = 4096, 12288
ROWS = (8, 64, 256, 1024)
_STEPS = re.compile(r'"iteration_bounds":\["\d+","\d+","(\d+)"\]')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ENTRY = re.compile(r"^ENTRY .*?^}", re.MULTILINE | re.DOTALL)
_NEGLIGIBLE = 1 << 60  # cycles from here on stand for "unknown"


def compare(topology: str) -> dict[str, Any]:
    """Return the figures of one chip by numbers of rows, and the numbers of texts."""
    mesh = make_mesh({}, topology_devices(parse_topology(topology))[:1])
    with jax.set_mesh(mesh):
        where = jax.NamedSharding(mesh, jax.P())

        def compiled(run: Callable[..., Any], rows: int) -> str:
            shapes = (rows, DEPTH), (DEPTH, COLUMNS)
            arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes]
            return jax.jit(run).lower(*arrays).compile().as_text() or ""

        by_rows = {str(rows): _figures(compiled(_product, rows), compiled(exact_matmul, rows)) for rows in ROWS}
    return {"rows": by_rows, "texts": {"exact_matmul": _texts(exact_matmul), "exact_row_sums": _texts(_sums)}}


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.dot(x, matrix)


def _sums(x: jax.Array, matrix: jax.Array) -> jax.Array:
    del matrix
    return exact_row_sums(x)


def _figures(by_xla: str, exact: str) -> dict[str, int | None]:
    steps = _STEPS.findall(by_xla)
    return {
        "xla_depth_steps": int(steps[0]) if steps else None,
        "xla_cycles": entry_cycles(by_xla),
        "exact_cycles": entry_cycles(exact) if "exact_matmul" in exact else None,
    }


def entry_cycles(program: str) -> int:
    """Return the estimated cycles of the operations of a program without loops: by the simulation where it has been."""
    entry = _ENTRY.search(program)
    each = [_CYCLES.findall(line) for line in (entry[0] if entry else "").splitlines()]
    found = [int(cycles[-1]) for cycles in each if cycles]  # XLA's own estimate comes first
    return sum(cycles for cycles in found if cycles < _NEGLIGIBLE)


def _texts(run: Callable[..., Any]) -> int:
    matrix = jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.bfloat16)
    rows = [jax.ShapeDtypeStruct((count, DEPTH), jnp.bfloat16) for count in ROWS]
    return len({without_batch(text) for one in rows for text in mosaic_texts(run, one, matrix)})


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1])))
