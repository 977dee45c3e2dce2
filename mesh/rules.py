"""Axis rules, from logical axes to mesh axes: the one small table behind every sharding in the stack.

Layers name the axes of their arrays by meaning ("embed", "heads"); the rules say over which mesh axes each is sharded.
Parameters and activations use different names where they are sharded differently: the model width of a parameter
("embed") is sharded over fsdp, that of an activation (None) is not. A config changes rules by its `axis_rules`, which
come into force together with its mesh (`use_mesh`).
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import contextlib
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh.errors import UserError, did_you_mean
from mesh.mesh import MESH_AXES

MeshAxes = tuple[str, ...] | str | None
AxisRules = Mapping[str, MeshAxes]

DEFAULT_RULES: AxisRules = MappingProxyType(
    {
        "batch": ("data", "fsdp", "expert"),
        "length": "sequence",
        "residual": ("sequence", "tensor"),  # the length between layers, where nothing needs all heads or hidden units
        "embed": "fsdp",
        "heads": "tensor",
        "hidden": "tensor",
        "experts": "expert",
        "vocab": "tensor",
        "layers": "pipeline",
    }
)

_EXCHANGED = ("length", "experts", "layers")

# Part of the keys of jax's caches: a jitted function is traced again under other rules. Pairs, for it must be hashable.
_changed: Any = jax.make_user_context(default_value=())


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: AxisRules | None = None) -> Generator[Mesh]:
    """Set the mesh of this thread, and the axis rules as in `use_rules`."""
    with use_rules(rules), jax.set_mesh(mesh):
        yield mesh


def use_rules(rules: AxisRules | None) -> contextlib.AbstractContextManager[None]:
    """Set the axis rules of this thread: the default ones with these in their place; None: the default ones.

    Raises:
        UserError: there is no such logical axis or mesh axis.
    """
    check_rules(rules or {})
    entries = ((axis, _names(entry)) for axis, entry in sorted((rules or {}).items()))
    return _changed(tuple((axis, names) for axis, names in entries if names != _names(DEFAULT_RULES[axis])))


def complete_rows() -> contextlib.AbstractContextManager[None]:
    """Set the rules of this thread to those in force, but that devices which share rows have rows of their own instead.

    For what needs complete rows on a mesh that shards their length: there the axis shards the batch.
    """
    over = tuple(name for name, size in axis_sizes("length").items() if size > 1)
    if not over:
        return contextlib.nullcontext()
    residual = tuple(name for name in mesh_axes("residual") if name not in over)
    changed = {"batch": (*mesh_axes("batch"), *over), "length": (), "residual": residual}
    return _changed(tuple(sorted({**dict(_changed.value), **changed}.items())))


def whole_residual() -> contextlib.AbstractContextManager[None]:
    """Set the rules of this thread to those in force, but that tokens between layers are not sharded over `tensor`."""
    kept = mesh_axes("length")
    residual = tuple(name for name in mesh_axes("residual") if name in kept)
    return _changed(tuple(sorted({**dict(_changed.value), "residual": residual}.items())))


def check_rules(rules: AxisRules, field: str = "axis_rules") -> None:
    """Refuse rules with an unknown axis, a mesh axis twice, or an axis that cannot be moved.

    Raises:
        UserError: naming the rule, by its path from `field`, and the nearest right name.
    """
    for axis, entry in rules.items():
        if axis not in DEFAULT_RULES:
            raise UserError(
                f"{field} has a rule for {axis!r}, which is no logical axis{did_you_mean(axis, DEFAULT_RULES)}"
            )
        names = _names(entry)
        for name in names:
            if name not in MESH_AXES:
                raise UserError(f"{field}.{axis}: the mesh has no axis {name!r}{did_you_mean(name, MESH_AXES)}")
        if len(set(names)) < len(names):
            raise UserError(f"{field}.{axis}: expected different mesh axes, got {names}")
        if axis in _EXCHANGED and names and names != _names(DEFAULT_RULES[axis]):
            expected = f"{DEFAULT_RULES[axis]!r} or None, for layers exchange data over that axis by its name"
            raise UserError(f"{field}.{axis}: expected {expected}; got {entry!r}")


def partition(*axes: str | None) -> PartitionSpec | None:
    """Return the partition of an array whose axes carry these logical names, or None where no mesh is set.

    None is what `out_sharding=` and initialisers take for "unsharded", so layers also run without a mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(None if axis is None else _entry(axis) for axis in axes))


def axis_sizes(axis: str) -> dict[str, int]:
    """Return the mesh axes over which a logical axis is sharded, and their sizes; empty without a mesh.

    Inside a `shard_map` those that it maps over are left out: there, what is left is one device's part of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh_axes(axis) if not mesh.empty and name not in mesh.manual_axes}


def manual_axis_sizes(axis: str) -> dict[str, int]:
    """Return the mesh axes of a logical axis over which a `shard_map` around this maps, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh_axes(axis) if name in mesh.manual_axes}


def mesh_axes(axis: str, rules: AxisRules | None = None) -> tuple[str, ...]:
    """Return the mesh axes of a logical axis, by the rules in force or, if given, by others."""
    changed = dict(_changed.value) if rules is None else rules
    return _names(changed[axis] if axis in changed else DEFAULT_RULES[axis])


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Give a traced array the partition of these logical axes (a newly made array is unsharded)."""
    spec = partition(*axes)
    return x if spec is None else jax.sharding.reshard(x, spec)


def to_named_sharding(abstract: Any, mesh: Mesh) -> Any:
    """Give the leaves of a `jax.eval_shape` result shardings on real devices (theirs name an abstract mesh)."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, getattr(a.sharding, "spec", PartitionSpec()))
        ),
        abstract,
    )


def _entry(axis: str) -> MeshAxes:
    """Return a partition's entry, without mesh axes of size 1, so that equal partitions are written equally."""
    names = tuple(name for name, size in axis_sizes(axis).items() if size > 1)
    return names if len(names) > 1 else names[0] if names else None


def _names(entry: MeshAxes) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
