"""Values inside a shard_map: the manual axes over which they vary from device to device."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable

import jax


def varying(x: jax.Array) -> frozenset[str]:
    """Return the manual axes over which x may vary; empty outside of a shard_map."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def vary[T: jax.Array](x: T, axes: Iterable[str]) -> T:
    """Return x as a value that may vary over these axes too; its gradient is summed over those that are new."""
    new = tuple(sorted(set(axes) - varying(x)))
    return jax.lax.pcast(x, new, to="varying") if new else x
