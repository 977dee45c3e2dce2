"""The head of a model with the tokens of each device, so that what is summed over devices is summed once.

In chunks of all devices' tokens, the gradient of the head would be summed over devices for every chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axlearn_like.layers.base import bind, split
from mesh.manual import vary
from mesh.sharding import gather_over, token_axes


def with_own_tokens(output: Any, fn: Callable[..., Any], x: jax.Array, *arrays: jax.Array) -> Any:
    """`fn(output, x, *arrays)`, on every device with its part of the tokens.

    Args:
        output: the layer that makes logits; it becomes whole over the mesh axes that cut tokens.
        fn: gives a pytree of arrays [batch, length, ...].
        x: final hidden states [batch, length, dim].
        arrays: each [batch, length, ...], cut as x is.
    """
    axes = token_axes(x)
    if not axes:
        return fn(output, x, *arrays)
    graphdef, params = split(output)

    def own(params: Any, *parts: jax.Array) -> Any:
        return fn(bind(graphdef, jax.tree.map(lambda leaf: vary(leaf, axes), params)), *parts)

    # In the type in which they are multiplied, as weights are that are gathered layer by layer.
    params = jax.tree.map(lambda leaf: gather_over(leaf.astype(x.dtype), axes), params)
    rows = PartitionSpec(*jax.typeof(x).sharding.spec[:2])
    specs = (PartitionSpec(), *(rows for _ in (x, *arrays)))
    return jax.shard_map(own, in_specs=specs, out_specs=rows, axis_names=set(axes))(params, x, *arrays)
