"""Rematerialisation as data: which arrays the backward pass finds stored, and which it recomputes.

Layers name the arrays that are worth a decision (`checkpoint_name`). A `Remat` is a mapping from such names to "save"
(kept on the device) or "offload" (kept in host memory); everything without an entry is recomputed. `PRESETS` are named
mappings.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax import ad_checkpoint

from mesh.errors import UserError, did_you_mean

Remat = Mapping[str, Literal["save", "offload"]]

# The arrays that layers name, in the order of a block; sizes in numbers per token and layer.
NAMES: dict[str, str] = {
    "block_input": "dim; the input of a block",
    "query": "heads x head_dim; rotated",
    "key": "kv_heads x head_dim; rotated",
    "value": "kv_heads x head_dim",
    "context": "heads x head_dim; the output of the attention kernel",
    "attention_out": "dim; the output of the attention layer",
    "routing": "3 x top_k integers; experts of a token, and the places of its rows among those of all",
    "gate": "hidden, in each expert of a token; before its activation",
    "up": "hidden, alike",
    "feed_forward_out": "dim; the output of the feed-forward network",
}

PRESETS: dict[str, Remat | None] = {
    "nothing": None,  # nothing is recomputed: all intermediate results are stored
    "products": {name: "save" for name in NAMES if name != "block_input"},  # outputs of matrix products and attention
    "attention": dict.fromkeys(("query", "key", "value", "context"), "save"),
    "context": {"context": "save"},  # the backward pass does not recompute attention
    "everything": {},  # everything is recomputed: a block keeps only its input
    "everything_offloaded": {"block_input": "offload"},  # same, in host memory
}


_SHARED = "shared"


def always_saved(x: jax.Array) -> jax.Array:
    """Return x, which is the same for all layers, marked to be stored for the backward pass whatever a `Remat` says.

    A scan over layers stores it once; otherwise every layer would recompute it, several times.
    """
    return ad_checkpoint.checkpoint_name(x, _SHARED)


def checkpoint_name(x: jax.Array, name: str) -> jax.Array:
    """Return x under a name that a `Remat` may mention."""
    assert name in NAMES, name
    return ad_checkpoint.checkpoint_name(x, name)


def find_remat(remat: str | Remat) -> Remat | None:
    """Return the mapping of a config: one itself, or the name of a preset. None: nothing is recomputed.

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
    """Return `fn` that stores for its backward pass only what `remat` mentions and what is `always_saved`."""
    if remat is None:
        return fn
    policy: Any = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[_SHARED, *(name for name, way in remat.items() if way == "save")],
        names_which_can_be_offloaded=[name for name, way in remat.items() if way == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(fn, policy=policy)  # pyright: ignore[reportArgumentType, reportReturnType]
