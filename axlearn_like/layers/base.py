"""What every layer is, and the two functions between a layer and its plain dict of parameters.

Layers are `nnx.Module`s only while they are built or traced. Outside, a model is a graph definition (static) and a
nested plain dict of arrays: that is what crosses `jax.jit`, what optimizers and checkpoints see, and what the
parameter server ships. Passing modules through `nnx.jit` instead costs 6 to 800 times the host time per step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from axlearn_like.config import Configurable
from mesh.errors import UserError
from mesh.rules import axis_sizes, partition

Params = dict[str, Any]
Initializer = Callable[..., jax.Array]


class Layer(nnx.Module, Configurable):
    """Base of all layers: `__init__(cfg, *, rngs)` makes parameters, `__call__` is pure."""


def split(layer: nnx.Module) -> tuple[nnx.GraphDef[Any], Params]:
    """A layer as (static graph definition, nested plain dict of arrays)."""
    graphdef, state = nnx.split(layer)
    return graphdef, nnx.to_pure_dict(state)


def bind[T: nnx.Module](graphdef: nnx.GraphDef[T], params: Params) -> T:
    """The layer again, to be called inside a traced function."""
    return nnx.merge(graphdef, params)


def param(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: Initializer,
    dtype: Any = jnp.float32,
) -> nnx.Param[jax.Array]:
    """A parameter born with its sharding; `axes` are logical names, one for each dimension of `shape`.

    Raises:
        UserError: a dimension does not divide over the mesh.
    """
    for place, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        sizes = {} if axis is None else axis_sizes(axis)
        if size % math.prod(sizes.values()):
            over = " x ".join(f"{name} {count}" for name, count in sizes.items() if count > 1)
            raise UserError(
                f"dimension {place} ({axis}) of a parameter of shape {tuple(shape)} is {size}, which does not divide "
                f"evenly over the mesh ({over})"
            )
    return nnx.Param(init(rngs.params(), tuple(shape), dtype, out_sharding=partition(*axes)))


def fan_in_init(fan_in: int) -> Initializer:
    """Normal with variance 1 / fan_in, cut at two standard deviations (which leaves 0.77 of the variance).

    `fan_in` is given because weights may have several input axes.
    """
    return jax.nn.initializers.truncated_normal(stddev=fan_in**-0.5)


def cast_late[T](params: T, index: jax.Array | None, dtype: DTypeLike) -> T:
    """Parameters of layer `index` of a stack, within the loop over them, to be cast to `dtype` there.

    XLA for TPUs propagates bfloat16 through slices, loops, selections and barriers: it casts the whole stack before the
    loop, and the copy is there all through the forward and the backward pass. A product it does not cross. So every
    parameter is multiplied by a one of which the compiler does not know that it is one; no bit changes. Only where fsdp
    cuts the stack, since elsewhere the copy saves reading twice as many bytes.
    """
    if index is None or math.prod(axis_sizes("embed").values()) == 1:
        return params
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else _times_one(leaf, index), params)


@jax.custom_vjp
def _times_one(x: jax.Array, index: jax.Array) -> jax.Array:
    return x * jnp.where(index >= 0, 1, 0).astype(x.dtype)


_times_one.defvjp(lambda x, index: (_times_one(x, index), None), lambda _, gradient: (gradient, None))
