"""Random weights with the shapes of a transformer's."""

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.base import Params

_LAYERS, _DIM, _KV, _FFN, _VOCAB = 12, 1024, 256, 4096, 65_536  # 250 million values, 1.0 GB of float32, 109 tensors
TINY = 32  # the cut of a smoke test, without meaningful figures


def shapes(cut: int = 1) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes, by layer and name. Every side is divided by `cut`."""
    layer = {
        "query": (_DIM, _DIM),
        "key": (_DIM, _KV),
        "value": (_DIM, _KV),
        "output": (_DIM, _DIM),
        "gate": (_DIM, _FFN),
        "up": (_DIM, _FFN),
        "down": (_FFN, _DIM),
        "attention_norm": (_DIM,),
        "ffn_norm": (_DIM,),
    }
    whole = {f"layer{at}": layer for at in range(_LAYERS)} | {"embed": {"table": (_VOCAB, _DIM)}}
    cut_down = lambda part: {key: tuple(side // cut for side in shape) for key, shape in part.items()}  # noqa: E731
    return {name: cut_down(part) for name, part in whole.items()}


def random_weights(cut: int = 1) -> Params:
    """Return float32 weights on the first device; they repeat every 16 MB, which nothing here exploits."""
    numbers = 0.02 * np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    draw = lambda shape: jnp.asarray(np.resize(numbers, shape))  # noqa: E731
    return jax.tree.map(draw, shapes(cut), is_leaf=lambda x: isinstance(x, tuple))


def updated(params: Params, version: int) -> Params:
    """Return other weights, which share most of their memory: only one vector depends on the version."""
    layer = params["layer0"]
    return {**params, "layer0": {**layer, "ffn_norm": jnp.full_like(layer["ffn_norm"], version)}}


def like(cut: int = 1) -> Params:
    """Return descriptions of the same arrays on this process's first device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    describe = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here)  # noqa: E731
    return jax.tree.map(describe, shapes(cut), is_leaf=lambda x: isinstance(x, tuple))
