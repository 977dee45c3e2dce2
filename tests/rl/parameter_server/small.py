"""Publishing and pulling small weights."""

from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import path_name
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.push.publisher import Pusher


def publish(client: ParameterServerClient, params: Params, version: int, pusher: Pusher | None = None) -> None:
    """Publish as a newly started trainer does, or as the trainer of this name."""
    publisher = client.publisher(pusher=pusher)
    publisher.publish(publisher.copy(jax.tree.map(jax.numpy.asarray, params), version))


def pull(client: ParameterServerClient, like: Params, version: int, timeout: float = 0.0) -> Params:
    """Pull as a newly started worker does."""
    return client.receiver(on_device(like)).pull(version, timeout)


def on_device(params: Params) -> Params:
    """Return arrays on the first device."""
    return jax.tree.map(jax.numpy.asarray, params)


def host(params: Params) -> dict[str, tuple[Any, ...]]:
    """Shape, type and bytes of every array, by path: equal if the weights are, to the bit."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    arrays = {path_name(path): np.asarray(leaf) for path, leaf in leaves}
    return {name: (array.shape, array.dtype.name, array.tobytes()) for name, array in arrays.items()}


def constant(value: float, size: int = 3) -> Params:
    """The smallest weights."""
    return {"w": np.full(size, value, np.float32)}
