"""Simulation of TPU kernels on a CPU, for tests and for `axl bench kernels`."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from jax.experimental.pallas import tpu as pltpu

from mesh.programs.jax_internals import give_literals_a_shape


@contextlib.contextmanager
def simulated(interpret: bool) -> Iterator[None]:
    """Run Pallas kernels by the interpreter in this block; JAX's attention kernel has no switch of its own for it."""
    if not interpret:
        yield
        return
    give_literals_a_shape()
    with pltpu.force_tpu_interpret_mode(cast(Any, True)):  # simulated memories (InterpretParams) lack reshaped views
        yield
