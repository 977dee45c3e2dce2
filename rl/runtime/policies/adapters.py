"""Weights of a policy that is a LoRA adapter: its factors travel alone, and become an adapter of an engine."""

from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from axlearn_like.config import ConfigBase, walk_configs
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.parameter_names import only, path_name
from axlearn_like.layers.wrappers.adapters import adapter_of, walk_wrappers
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.protocol.messages import Seat
from rl.rollout.model_runner.adapter_bank import AdapterLimits

VERSIONS_HELD = 2  # versions of a policy in an engine at a time: one that is drawn to its end, and its successor


def are_adapters(policy: ConfigBase[Any]) -> bool:
    """Return True if policies beside such a one are LoRA adapters of one base, False if each is a whole model."""
    return any(isinstance(layer, LoRA.Config) for _, layer in walk_configs(policy))


def factors_like(policy: ConfigBase[Any]) -> Params:
    """Return the factors of a LoRA policy as abstract arrays of one device, nested as in its parameters."""
    built = build_abstract(policy)
    folders = tuple(f"{place}lora/" for _, place, layer in walk_wrappers(built) if isinstance(layer, LoRA))
    params = split(built)[1]
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        only(params, [path for path in paths if path.startswith(folders)]),
    )


def adapter_limits(policy: ConfigBase[Any], policies: int) -> AdapterLimits:
    """Return the room that an engine needs for `VERSIONS_HELD` adapters of each of so many policies.

    Rank and matrices are those of the experiment's own `policy`, not of those beside it: sums may depend on the rank.

    Raises:
        UserError: it is no LoRA policy, or adapts what cannot be adapted row by row.
    """
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), factors_like(policy))
    adapter = adapter_of(policy, nothing)
    return AdapterLimits(VERSIONS_HELD * policies, adapter.rank, tuple(adapter.factors))


def adapter_source(policy: ConfigBase[Any], weights: ParameterServerClient, *, newest: bool = False) -> Prefetcher:
    """Return the source of a policy's `Adapter`s; `newest`: see `Prefetcher` (UserError: a codec would round them)."""
    receiver = weights.receiver(factors_like(policy))
    if receiver.approximations:
        raise UserError(f"parameter_server.codec={weights.codec!r}: expected 'raw' or 'delta' with several policies")
    return Prefetcher(receiver, lambda params: adapter_of(policy, params), newest=newest, background=weights.remote)


def adapter_name(seat: Seat) -> str:
    """Return the name of the adapter that draws a role: a restarted trainer may make other weights of a version."""
    return f"{seat.policy}@{seat.version}.{seat.incarnation:x}"
