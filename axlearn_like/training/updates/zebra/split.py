"""The division of a decoder's parameters, and of trees like them, between attention's devices and experts' devices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.layers.parameter_names import merged, path_name
from mesh.rules import use_mesh

EXPERTS = "experts"  # name of the matrices of experts, in a block's feed-forward layer and in both parts
REST = "rest"  # name in attention's part of all other parameters
_PATH = ("layers", "feed_forward", EXPERTS)


class Share(NamedTuple):
    """Place of a layer's experts in one part: entry `at` of the stack of all layers with `count` experts there."""

    count: int
    at: int


class ExpertSplit:
    """The first experts of each layer are on experts' devices, the last `moved[layer]` on attention's.

    Attention's part is {"rest": parameters without experts, "experts": stacks}, experts' part {"experts": stacks}.
    Stacks are {number of experts: {name: [layers with so many, experts, ...]}}: paths keep their last names, and arrays
    their axes, by which optimizers choose.
    """

    def __init__(self, moved: Sequence[int], num_experts: int, attention: Mesh, experts: Mesh):
        self.moved, self.num_experts = tuple(moved), num_experts
        self._meshes = {"attention": attention, EXPERTS: experts}
        self.local = _shares(self.moved)  # shares of attention's devices, by layer; None: none of its experts
        self.remote = _shares([num_experts - one for one in self.moved])

    def parted(self, tree: Any) -> tuple[Any, Any]:
        """Return attention's part and experts' part of a tree that has dicts like the parameters in it.

        Other arrays, such as counts, are in both. Experts are moved to where they belong.
        """
        attention = jax.tree.map(lambda x: self._attention(x) if is_whole(x) else x, tree, is_leaf=is_whole)
        everywhere = NamedSharding(self._meshes[EXPERTS], PartitionSpec())
        experts = jax.tree.map(
            lambda x: self._experts(x) if is_whole(x) else _put(x, everywhere), tree, is_leaf=is_whole
        )
        return attention, experts

    def whole(self, attention: Any, experts: Any) -> Any:
        """Return the tree of which these are the parts; all experts are on experts' devices."""
        return jax.tree.map(lambda a, e: self._whole(a, e) if _is_part(a) else a, attention, experts, is_leaf=_is_part)

    def described(self, attention: Any, experts: Any) -> Any:
        """Return the whole described tree of two that are described on the mesh of each group."""
        chosen = lambda path, a, e: e if EXPERTS in path_name(path).split("/") else a  # noqa: E731
        return jax.tree_util.tree_map_with_path(chosen, attention, experts)

    def _attention(self, params: Mapping[str, Any]) -> dict[str, Any]:
        matrices = matrices_of(params)
        stacks = self._stacks(matrices, self.local, lambda count: slice(self.num_experts - count, None), "attention")
        return {REST: without_matrices(params), EXPERTS: stacks}

    def _experts(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {EXPERTS: self._stacks(matrices_of(params), self.remote, lambda count: slice(count), EXPERTS)}

    def _stacks(
        self, matrices: Any, shares: Sequence[Share | None], kept: Callable[[int], slice], where: str
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for count, layers in _layers(shares).items():
            everything = count == self.num_experts and len(layers) == len(self.moved)
            cut = partial(_cut, layers=layers, part=kept(count), mesh=self._meshes[where])
            found[str(count)] = matrices if everything else jax.tree.map(cut, matrices)
        return found

    def _whole(self, attention: Any, experts: Any) -> dict[str, Any]:
        remote, local = experts[EXPERTS], attention[EXPERTS]
        if not local:
            matrices = remote[str(self.num_experts)]
        else:
            names = next(iter(remote.values()))
            matrices = {name: self._joined(name, remote, local) for name in names}
        return merged(attention[REST], as_matrices(matrices))

    def _joined(self, name: str, remote: Any, local: Any) -> Any:
        where, mesh = next(iter(remote.values()))[name].sharding, self._meshes[EXPERTS]

        def joined(remote: Any, local: Any) -> jax.Array:
            def of(stacks: Any, share: Share | None) -> list[jax.Array]:
                return (
                    [] if share is None else [jax.sharding.reshard(stacks[str(share.count)][share.at], PartitionSpec())]
                )

            pairs = zip(self.remote, self.local, strict=True)
            layers = [jnp.concatenate([*of(remote, one), *of(local, other)]) for one, other in pairs]
            return jax.sharding.reshard(jnp.stack(layers), where.spec)

        moved = {
            count: jax.device_put(part[name], NamedSharding(mesh, PartitionSpec())) for count, part in local.items()
        }
        with use_mesh(mesh):
            program: Any = jax.jit(joined)
            return program({count: part[name] for count, part in remote.items()}, moved)


def _cut(x: Any, *, layers: list[int], part: slice, mesh: Mesh) -> Any:
    """Return some experts of some layers, sharded over a mesh as the array is over its own."""
    where = NamedSharding(mesh, x.sharding.spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = (len(layers), len(range(x.shape[1])[part]), *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)
    with use_mesh(x.sharding.mesh):
        taken: Any = jax.jit(lambda x: jax.sharding.reshard(x, PartitionSpec())[np.array(layers)][:, part])
        return jax.device_put(taken(x), where)


def _shares(counts: Sequence[int]) -> tuple[Share | None, ...]:
    seen: dict[int, int] = {}
    found: list[Share | None] = []
    for count in counts:
        found.append(Share(count, seen.get(count, 0)) if count else None)
        seen[count] = seen.get(count, 0) + 1
    return tuple(found)


def _layers(shares: Sequence[Share | None]) -> dict[int, list[int]]:
    """Return the layers of each stack, by its number of experts."""
    found: dict[int, list[int]] = {}
    for layer, share in enumerate(shares):
        if share is not None:
            found.setdefault(share.count, []).append(layer)
    return found


def is_whole(tree: Any) -> bool:
    """Return True for a decoder's parameters, or a dict like them, with its experts or without."""
    return isinstance(tree, dict) and "layers" in tree and "embedding" in tree


def _is_part(tree: Any) -> bool:
    return isinstance(tree, dict) and EXPERTS in tree and REST in tree


def matrices_of(params: Mapping[str, Any]) -> Any:
    """Return the matrices of experts, {name: [layers, experts, ...]}."""
    layers, feed_forward, experts = _PATH
    return params[layers][feed_forward][experts]


def without_matrices(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without those."""
    layers, feed_forward, experts = _PATH
    feed = {name: part for name, part in params[layers][feed_forward].items() if name != experts}
    return {**params, layers: {**params[layers], feed_forward: feed}}


def as_matrices(matrices: Any) -> dict[str, Any]:
    """Return parameters that are these matrices of experts alone, by their paths."""
    return {_PATH[0]: {_PATH[1]: {_PATH[2]: matrices}}}


def _put(x: Any, where: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.device_put(x, where)
