"""What the backward pass finds stored, and what it computes again: rematerialisation as data.

Layers name the arrays that are worth a decision (`checkpoint_name`). A `Remat` is a mapping from such names to "save"
(kept on the device) or "offload" (kept in the host's memory); everything without an entry is computed again. `PRESETS`
are mappings that have names of their own.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax import ad_checkpoint

from mesh.errors import UserError, did_you_mean

Remat = Mapping[str, Literal["save", "offload"]]

# What layers name, in the order of a block. The sizes are of one token of one layer, in activations' numbers.
NAMES: dict[str, str] = {
    "block_input": "dim; what comes into a block",
    "query": "heads x head_dim; rotated",
    "key": "kv_heads x head_dim; rotated",
    "value": "kv_heads x head_dim",
    "context": "heads x head_dim; values mixed by attention",
    "attention_out": "dim; what attention adds",
    "gate": "hidden; before its activation",
    "up": "hidden",
    "feed_forward_out": "dim; what the feed-forward network adds",
}

PRESETS: dict[str, Remat | None] = {
    "nothing": None,  # recomputed: all intermediate results are stored
    "products": {name: "save" for name in NAMES if name != "block_input"},  # what matrix products and attention made
    "attention": dict.fromkeys(("query", "key", "value", "context"), "save"),
    "context": {"context": "save"},  # the backward pass need not attend again
    "everything": {},  # recomputed: a block keeps its input alone
    "everything_offloaded": {"block_input": "offload"},  # and that in the host's memory
}


_SHARED = "shared"


def always_saved(x: jax.Array) -> jax.Array:
    """x, which is the same for all layers: kept for the backward pass whatever a `Remat` says.

    A scan over layers stores it once; within every layer it would be computed again, several times over.
    """
    return ad_checkpoint.checkpoint_name(x, _SHARED)


def checkpoint_name(x: jax.Array, name: str) -> jax.Array:
    """x, under a name that a `Remat` may mention."""
    assert name in NAMES, name
    return ad_checkpoint.checkpoint_name(x, name)


def find_remat(remat: str | Remat) -> Remat | None:
    """The mapping that a config means: one itself, or the name of a preset. None: nothing is recomputed.

    Raises:
        UserError: there is no such preset, array or way to keep one; the nearest names are given.
    """
    if isinstance(remat, str):
        if remat not in PRESETS:
            raise UserError(f"remat: no preset {remat!r}{did_you_mean(remat, PRESETS)}")
        return PRESETS[remat]
    for name, way in remat.items():
        if name not in NAMES:
            raise UserError(f"remat: no layer names an array {name!r}{did_you_mean(name, NAMES)}")
        if way not in ("save", "offload"):
            raise UserError(f"remat[{name!r}] is {way!r}; expected 'save' or 'offload'")
    return remat


def checkpoint[F](fn: F, remat: Remat | None) -> F:
    """`fn`, of whose intermediate results only what `remat` mentions, and what layers share, is kept for the backward
    pass.
    """
    if remat is None:
        return fn
    policy: Any = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[_SHARED, *(name for name, way in remat.items() if way == "save")],
        names_which_can_be_offloaded=[name for name, way in remat.items() if way == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(fn, policy=policy)  # pyright: ignore[reportArgumentType, reportReturnType]
