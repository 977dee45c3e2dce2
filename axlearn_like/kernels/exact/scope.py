"""Numerics of what is traced: sums left to XLA, or made by kernels whose order does not depend on the batch.

XLA for TPUs chooses the order of a product's sum by the number of rows, so a token's bits depend on how many others are
computed beside it, and a sampler and a scorer disagree. Within `use_numerics("exact")` products, row sums and attention
with a cache are kernels of fixed tiles. On CPUs the layers fix the order themselves (`deterministic.py`, `linear.py`).
"""

import contextlib
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Literal, NamedTuple

import jax

from mesh.devices import platform
from mesh.errors import UserError
from mesh.rules import axis_sizes
from mesh.sharding import full_spec

Numerics = Literal["default", "exact"]

# Of programs on TPUs: a sum of bfloat16 numbers that is read within the same fusion is rounded all the same.
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


def on_own_rows(body: Callable[..., jax.Array], rows: tuple[jax.Array, ...], *whole: jax.Array) -> jax.Array:
    """Return `body(*rows, *whole)`, computed under a mesh by every device for its own rows.

    Args:
        body: its result has the rows as first axis.
        rows: arrays with the batch as first axis, which alone is sharded.
        whole: arrays that every device gets complete.

    Raises:
        UserError: the mesh shards something else than rows: sums over devices have no fixed order.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return body(*rows, *whole)
    for axis in ("heads", "hidden", "vocab", "length"):
        if others := [name for name, size in axis_sizes(axis).items() if size > 1]:
            raise UserError(
                f'numerics="exact": the mesh axis {others[0]} shards {axis}, and sums over devices have no fixed '
                "order; expected a mesh that shards rows (data) and parameters (fsdp) alone"
            )

    spec = full_spec(rows[0])
    own = jax.P(None if spec is None else spec[0])
    specs = (*[own] * len(rows), *[jax.P()] * len(whole))
    arrays = [jax.sharding.reshard(x, of) for x, of in zip((*rows, *whole), specs, strict=True)]
    return jax.shard_map(body, in_specs=specs, out_specs=own, check_vma=False)(*arrays)
