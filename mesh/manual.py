"""Inside a shard_map: over which of its axes a value differs from device to device."""

from collections.abc import Iterable

import jax


def varying(x: jax.Array) -> frozenset[str]:
    """The manual axes over which x may differ; empty outside of a shard_map."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def vary[T: jax.Array](x: T, axes: Iterable[str]) -> T:
    """X as a value that may differ over these axes too; its gradient is summed over those that are new."""
    new = tuple(sorted(set(axes) - varying(x)))
    return jax.lax.pcast(x, new, to="varying") if new else x
