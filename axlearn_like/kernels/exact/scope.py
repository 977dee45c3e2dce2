"""Numerics of what is traced: sums left to XLA, or made by kernels whose order does not depend on the batch.

XLA for TPUs chooses the order of a product's sum by the number of rows, so a token's bits depend on how many others are
computed beside it, and a sampler and a scorer disagree. Within `use_numerics("exact")` products, row sums and attention
with a cache are kernels of fixed tiles, and sums over devices have a fixed order (parts.py). On CPUs the layers fix the
order themselves (`deterministic.py`, `linear.py`).
"""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Literal, NamedTuple

from mesh.devices import platform
from mesh.errors import UserError
from mesh.rules import whole_residual

Numerics = Literal["default", "exact"]

# Options of programs on TPUs: a sum of bfloat16 numbers is rounded where it is read within the same fusion, too.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class ExactKernels(NamedTuple):
    """The kernels in force; `interpret`: simulated, on a CPU."""

    interpret: bool = False


def numerics_of(model: object) -> Numerics:
    """Return a model config's `numerics`; "default" where it has no such field."""
    return getattr(model, "numerics", "default")


_wanted: ContextVar[ExactKernels | None] = ContextVar("numerics", default=None)


@contextlib.contextmanager
def use_numerics(numerics: Numerics, *, interpret: bool = False) -> Generator[None]:
    """Trace what is within with these numerics.

    Args:
        numerics: numerics of products, row sums, and attention with a cache or of whole rows.
        interpret: with the kernels for TPUs simulated, which is slow; it holds for scopes within this one.
    """
    outer = _wanted.get()
    simulated = interpret or (outer is not None and outer.interpret)
    token = _wanted.set(ExactKernels(simulated) if numerics == "exact" else None)
    try:
        with whole_residual() if numerics == "exact" else contextlib.nullcontext():
            yield
    finally:
        _wanted.reset(token)


def exact_kernels() -> ExactKernels | None:
    """Return the kernels of fixed order that are in force; None: sums are XLA's.

    Raises:
        UserError: exact numerics are wanted on a platform that has none.
    """
    wanted = _wanted.get()
    if wanted is None or wanted.interpret:
        return wanted
    where = platform()
    if where == "gpu":
        raise UserError('numerics="exact": there are no kernels of fixed order for GPUs; expected a TPU or a CPU')
    return wanted if where == "tpu" else None


def refuse_exact(what: str) -> None:
    """Refuse a computation whose order is XLA's, where kernels of fixed order are in force (UserError)."""
    if exact_kernels() is not None:
        raise UserError(f'numerics="exact": {what} has no form of fixed order on TPUs; expected numerics="default"')
