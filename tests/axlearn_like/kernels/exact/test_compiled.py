"""Products compiled for TPUs: XLA cuts the depth by the number of rows, and one kernel of fixed order serves all."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from axlearn_like.kernels.exact.matmul import exact_matmul
from axlearn_like.kernels.exact.row_sums import exact_row_sums
from mesh import make_mesh
from mesh.topology import parse_topology, topology_devices
from tests.axlearn_like.kernels.mosaic import mosaic_texts, without_batch
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

DEPTH, COLUMNS = 4096, 12288
ROWS = (8, 64, 256, 1024)
STEPS = re.compile(r'"iteration_bounds":\["\d+","\d+","(\d+)"\]')  # the last: parts of the depth, added up in turn


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_the_order_of_xla_depends_on_the_rows(topology: str):
    steps = elsewhere(depth_steps, topology, environ=TPU_COMPILER, timeout=400)
    assert len(set(steps)) > 1 and None not in steps


@pytest.mark.full
def test_kernels_of_fixed_order_are_one_text_for_all_rows():
    assert _texts(exact_matmul) == 1
    assert _texts(lambda x, matrix: exact_row_sums(x)) == 1


def depth_steps(topology: str) -> list[int | None]:
    """Return the steps into which XLA cuts the depth of a product, by its numbers of rows."""
    mesh = make_mesh({}, topology_devices(parse_topology(topology))[:1])
    with jax.set_mesh(mesh):
        found = [STEPS.search(_compiled(rows, jax.NamedSharding(mesh, jax.P()))) for rows in ROWS]
    return [int(steps[1]) if steps else None for steps in found]


def _compiled(rows: int, where: jax.NamedSharding) -> str:
    shapes = (rows, DEPTH), (DEPTH, COLUMNS)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes]
    return jax.jit(jnp.dot).lower(*arrays).compile().as_text() or ""


def _texts(run: Callable[..., Any]) -> int:
    matrix = jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.bfloat16)
    rows = [jax.ShapeDtypeStruct((count, DEPTH), jnp.bfloat16) for count in ROWS]
    return len({without_batch(text) for one in rows for text in mosaic_texts(run, one, matrix)})
