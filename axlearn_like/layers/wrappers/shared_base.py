"""The frozen base that several LoRA adapters share in one process: one copy of its arrays."""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import only, path_name
from mesh.errors import UserError, did_you_mean

Base = Mapping[str, jax.Array]  # path in the plain model -> parameter, on the mesh


def base_of(params: Params) -> Base:
    """Return nested parameters by their paths in the plain model: the same arrays."""
    return {plain_name(path_name(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def held_of(base: Base, wanted: Params, frozen: Collection[str]) -> Params:
    """Return the frozen parameters of a policy out of a base: the same arrays, nested as the policy has them.

    Args:
        wanted: all parameters of the policy, described.
        frozen: paths of those that no update changes.

    Raises:
        UserError: the base lacks one, or has it in another shape; or others than factors of LoRA layers are trained.
    """
    check_adapter(wanted, frozen)

    def found(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = plain_name(path_name(path))
        if name not in base:
            raise UserError(f"{path_name(path)} is frozen, but the base has no {name}{did_you_mean(name, base)}")
        known = base[name]
        if (known.shape, known.dtype, known.sharding) != (like.shape, like.dtype, like.sharding):
            shown = f"{known.dtype}{list(known.shape)} by {known.sharding}"
            raise UserError(f"{name}: expected {like.dtype}{list(like.shape)} by {like.sharding}; the base has {shown}")
        return known

    return jax.tree_util.tree_map_with_path(found, only(wanted, frozen))


def plain_name(path: str) -> str:
    """Return the path of a parameter in the model without wrappers."""
    return "/".join(part for part in path.split("/") if part != "inner")


def check_adapter(params: Params, frozen: Collection[str]) -> None:
    """Refuse a learner that trains other parameters than factors of LoRA layers, or nothing (UserError)."""
    names = sorted({path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}.difference(frozen))
    other = next((name for name in names if "/lora/" not in f"/{name}"), None)
    if not names or other is not None:
        trained = "nothing is trained" if other is None else f"{other} is trained too"
        raise UserError(
            "learner.groups: expected ParameterGroup.Config(match='*/lora/*') and ParameterGroup.Config(frozen=True), "
            f"for policies are LoRA adapters of one base; {trained}"
        )
