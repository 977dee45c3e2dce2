"""The division of a state between what all members of a run hold and its experts, each by itself."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from axlearn_like.elastic.experts import Key
from axlearn_like.layers.parameter_names import merged
from axlearn_like.training.updates.zebra.split import as_matrices, is_whole, matrices_of, without_matrices


def rest_of(tree: Any) -> Any:
    """Return a tree that has dicts like the parameters in it, without their experts."""
    return jax.tree.map(lambda x: without_matrices(x) if is_whole(x) else x, tree, is_leaf=is_whole)


def expert_of(tree: Any, key: Key) -> Any:
    """Return one expert of such a tree, each array [1, 1, ...], and counts and the like, as they are."""
    layer, expert = key

    def cut(x: Any) -> Any:
        if not is_whole(x):
            return x
        one = {name: matrix[layer : layer + 1, expert : expert + 1] for name, matrix in matrices_of(x).items()}
        return as_matrices(one)

    return jax.tree.map(cut, tree, is_leaf=is_whole)


def whole_of(rest: Any, experts: Mapping[Key, Any], shape: tuple[int, int]) -> Any:
    """Return the tree, in host memory, of its rest and all experts of so many layers and experts."""
    keys = sorted(experts)

    def join(first: Any, *each: Any) -> Any:
        if not is_whole(first):
            return first
        stacked = jax.tree.map(lambda *x: np.concatenate(x).reshape(*shape, *x[0].shape[2:]), *map(matrices_of, each))
        return merged(first, as_matrices(stacked))

    return jax.tree.map(join, rest, *(experts[key] for key in keys), is_leaf=is_whole)


def flat(tree: Any) -> np.ndarray:
    """Return the arrays of a tree as one float32 vector."""
    return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(tree)])


def shaped(vector: np.ndarray, like: Any) -> Any:
    """Return a tree of views of such a vector, with the shapes of another tree."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    pieces = np.split(vector, ends[:-1])
    return jax.tree.unflatten(structure, [p.reshape(leaf.shape) for p, leaf in zip(pieces, leaves, strict=True)])


def zeros_of(tree: Any, dtype: Any = None) -> Any:
    """Return zeros of the shapes of a tree on its devices, of its types or of one."""
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, dtype or x.dtype), x.sharding), tree)
