"""Experts in a fixed order of sums: what a token's experts add up to, whatever tokens stand beside it, on any mesh.

Products are by kernels of fixed tiles (kernels/exact/grouped_matmul.py). The width of experts, which `tensor` may
shard, has a fixed number of parts: of each the weighted outputs of a token's experts are added, likeliest first, and
then the parts by a tree (kernels/exact/parts.py).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axlearn_like.kernels.exact.matmul import exact_grouped_matmul
from axlearn_like.kernels.exact.parts import parts_of, sharing_axes, sum_over_devices, tree_sum
from axlearn_like.layers.moe.dispatch import combine, counts, order_by, repeat_sorted
from axlearn_like.layers.wrappers.matrix_forms import StackEntry
from mesh.errors import UserError
from mesh.rules import axis_sizes, partition

Hidden = Callable[[jax.Array, jax.Array], jax.Array]


_UNITS = 8  # hidden units of a part: a multiple of them, as TPUs hold rows of a matrix in eights


def _parts(width: int) -> int:
    return 1 if width % _UNITS else parts_of(width // _UNITS)


def sum_of_experts(
    x_btd: jax.Array,
    experts_btk: jax.Array,
    weights_btk: jax.Array,
    matrices: tuple[Any, Any, Any],
    hidden: Hidden,
    *,
    interpret: bool,
) -> jax.Array:
    """Return the weighted sum of each token's experts [b, t, d], without a gradient.

    Args:
        experts_btk: int32; as many as there are experts: none, for padding.
        weights_btk: float32.
        matrices: gate and up [e, d, f] and down [e, f, d], or entries of stacks of them; in the type of x.
        hidden: hidden units of the products with gate and up.

    Raises:
        UserError: the mesh shards experts, or shares their units among more devices than their sums have parts.
    """
    stacks = [w if isinstance(w, StackEntry) else StackEntry(w[None], jnp.int32(0)) for w in matrices]
    num_experts, _, width = stacks[0].shape
    arrays = (x_btd, experts_btk, weights_btk, *(one.stack for one in stacks), *(one.index for one in stacks))
    if jax.sharding.get_abstract_mesh().empty:
        return _of_device(*arrays, parts=_parts(width), sharing=(), hidden=hidden, interpret=interpret)
    if any(size > 1 for size in axis_sizes("experts").values()):
        raise UserError('numerics="exact": the mesh shards experts; expected expert=1, and tensor or fsdp instead')
    sharing = sharing_axes("hidden")
    parts, devices = _parts(width), math.prod(axis_sizes("hidden").values())
    if devices > parts:
        raise UserError(
            f'numerics="exact": experts of {width} hidden units have sums of {parts} parts, which {devices} devices '
            f"({', '.join(sharing)}) cannot share; expected a multiple of {_UNITS * devices} hidden units"
        )
    rows: Any = partition("batch", None, None)
    inner, outer = partition(None, None, None, "hidden"), partition(None, None, "hidden", None)
    specs = (rows, rows, rows, inner, inner, outer, *[PartitionSpec()] * 3)

    own = partial(_of_device, parts=parts // devices, sharing=sharing, hidden=hidden, interpret=interpret)
    run = jax.shard_map(own, in_specs=specs, out_specs=rows, check_vma=False)
    return run(*jax.sharding.reshard(arrays, specs))


def _of_device(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *stacks: jax.Array,
    parts: int,
    sharing: tuple[str, ...],
    hidden: Hidden,
    interpret: bool,
) -> jax.Array:
    """Return the sum, from stacks of gate, up and down, and the layers' places in them."""
    (batch, length, dim), top_k = x.shape, experts.shape[-1]
    gate, up, down, *layers = stacks
    chosen = experts.reshape(-1)
    order, sizes = order_by(chosen), counts(chosen, gate.shape[1])
    rows = repeat_sorted(x.reshape(-1, dim), order)
    live = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    gated, upper = (
        exact_grouped_matmul(rows, w, sizes, layer, interpret=interpret)
        for w, layer in zip((gate, up), layers[:2], strict=True)
    )
    units = jnp.where(live, hidden(gated, upper), 0)
    size = units.shape[1] // parts

    def added(part: int) -> jax.Array:
        some = units[:, part * size : (part + 1) * size]
        options: dict[str, Any] = {"part": part, "parts": parts, "dtype": jnp.float32, "interpret": interpret}
        y = jnp.where(live, exact_grouped_matmul(some, down, sizes, layers[2], **options), 0.0)
        return combine(y, order, weights.reshape(-1, top_k))

    return sum_over_devices(tree_sum(added, parts), sharing, x.dtype).reshape(batch, length, dim)
