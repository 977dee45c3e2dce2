"""Attention behind one interface: the first kernel that supports it, on arrays sharded over the mesh."""

import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.context_parallel import all_gather, ring, zigzag
from axlearn_like.kernels.attention.cudnn import Cudnn
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel, Layout, ScoreRules
from axlearn_like.kernels.attention.shared_prefix import PrefixRows
from axlearn_like.kernels.attention.splash import Splash
from axlearn_like.kernels.attention.xla import Xla
from axlearn_like.remat import checkpoint_name
from mesh.devices import platform
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A kernel, and why those before it were refused."""

    kernel: Kernel
    refused: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"not {name}: {why}" for name, why in self.refused.items())
        return type(self.kernel).__name__ + (f" ({others})" if others else "")


class FirstSupported(Kernel):
    """The first of several kernels that supports a signature. Configure a single kernel instead to force that one."""

    class Config(ConfigBase["FirstSupported"]):
        kernels: tuple[ConfigBase, ...] = (Splash.Config(), Cudnn.Config(), Xla.Config())

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.kernels: tuple[Kernel, ...] = tuple(kernel.build() for kernel in cfg.kernels)


@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """The parameters of attention that a layer gives a context."""

    rules: ScoreRules  # masks and score transformations
    kernel: Kernel  # one, or `FirstSupported`
    context_parallel: Any  # `AllGather` or `Ring`, for meshes that shard the length
    sinks: jax.Array | None = None  # float32 [k, q], or None


def choose(kernel: Kernel, signature: AttentionSignature) -> Choice:
    """Return the kernel for a signature (UserError: none supports it; the message has the reason of each)."""
    candidates = kernel.kernels if isinstance(kernel, FirstSupported) else (kernel,)
    refused = {}
    for one in candidates:
        why = one.supported(signature)
        if why is None:
            return Choice(one, refused)
        refused[type(one).__name__] = why
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    raise UserError(f"Attention.kernel: no kernel can do this attention ({reasons})")


@functools.lru_cache(maxsize=256)
def _chosen(kernel: Kernel, signature: AttentionSignature) -> Kernel:
    """Return `choose(...).kernel`, and log the choice once for each signature."""
    choice = choose(kernel, signature)
    _log.info(
        "attention of %d tokens, heads %d x %d of %d, %s: %s",
        *(signature.length, signature.kv_heads, signature.per_kv, signature.head_dim, signature.platform, choice),
    )
    return choice.kernel


def explain(
    attention: Any,
    *,
    platform: str,
    dtype: Any,
    length: int,
    cp_size: int = 1,
    shared_prefix: PrefixRows | None = None,
) -> Choice:
    """Return the kernel that an attention layer gets for packed rows, and why others were refused.

    Args:
        attention: a layer with `query_shape` (k, q, h), `value_dim`, `rules`, `kernel`, `context_parallel` and
            `sinks_kq`.

    Raises:
        UserError: no kernel supports it.
    """
    kv_heads, per_kv, head_dim = attention.query_shape
    signature = AttentionSignature(
        *(platform, np.dtype(dtype), length, kv_heads, per_kv, head_dim, attention.value_dim, attention.rules),
        sinks=attention.sinks_kq is not None,
        cp_size=cp_size,
        layout="zigzag" if cp_size > 1 else "straight",
        ring=cp_size > 1 and attention.context_parallel.ring,
        shared_prefix=shared_prefix,
    )
    zigzag.order(length, cp_size, signature.layout)
    return choose(attention.kernel, signature)


def attend(
    q_btkqh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    attention: AttentionParams,
    *,
    segment_ids: jax.Array,
    layout: Layout = "straight",
) -> jax.Array:
    """Return the attention of packed rows to themselves, [b, t, k, q, h], sharded as the queries are.

    Args:
        v_btkh: values; their width may be another.
        segment_ids: int32 [b, t]; tokens see those of their own segment only, by their order in the row.
        layout: order of a row's tokens over the devices of the mesh's sequence axis.

    Raises:
        UserError: no kernel supports it, or rows do not divide over the mesh.
    """
    cp_size = axis_sizes("length").get("sequence", 1)
    signature = _described(q_btkqh, v_btkh, attention)
    signature = dataclasses.replace(
        signature,
        cp_size=cp_size,
        layout=layout if cp_size > 1 else "straight",
        ring=cp_size > 1 and attention.context_parallel.ring,
    )
    places = zigzag.order(signature.length, signature.cp_size, signature.layout)
    arrays = AttentionArrays(q_btkqh, k_btkh, v_btkh, segment_ids, places, attention.sinks)
    return _run(_chosen(attention.kernel, signature), signature, arrays)


def stores_scores(q_btkqh: jax.Array, v_btkh: jax.Array, attention: AttentionParams) -> bool:
    """Return True if packed rows of these queries and values are left to XLA."""
    return isinstance(_chosen(attention.kernel, _described(q_btkqh, v_btkh, attention)), Xla)


def attend_shared_prefix(
    q_btkqh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    attention: AttentionParams,
    *,
    shared_prefix: PrefixRows,
    segment_ids: jax.Array,
    codes: jax.Array | None = None,
    layout: Layout = "straight",
) -> jax.Array | None:
    """Return `attend` of rows that hold prompts and their completions; None where the chosen kernel cannot.

    Args:
        q_btkqh: queries, t being `shared_prefix.length`, and on a mesh that shards rows padding behind it.
        shared_prefix: sizes, which say what a token sees by its index.
        segment_ids: int32 [b, t]; equal ones see each other: 0 is padding.
        codes: int32 [b, t], of each row, `codes` of `SharedPrefixes` or `SharedPrefixTrees`.
        layout: order of a row's tokens over the devices of the mesh's sequence axis.

    Raises:
        UserError: no kernel supports it.
    """
    signature = dataclasses.replace(
        _described(q_btkqh, v_btkh, attention),
        shared_prefix=shared_prefix,
        cp_size=axis_sizes("length").get("sequence", 1),
        layout=layout,
    )
    kernel = _chosen(attention.kernel, signature)
    if not kernel.shared_prefixes:
        return None
    places = zigzag.order(signature.length, signature.cp_size, signature.layout) if codes is None else codes
    return _run(kernel, signature, AttentionArrays(q_btkqh, k_btkh, v_btkh, segment_ids, places, attention.sinks))


def _described(q_btkqh: jax.Array, v_btkh: jax.Array, attention: AttentionParams) -> AttentionSignature:
    """Return the signature of rows that are complete on each device."""
    return AttentionSignature(
        platform=platform(),
        dtype=np.dtype(q_btkqh.dtype),
        length=q_btkqh.shape[1],
        kv_heads=q_btkqh.shape[2],
        per_kv=q_btkqh.shape[3],
        head_dim=q_btkqh.shape[4],
        value_dim=v_btkh.shape[-1],
        rules=attention.rules,
        sinks=attention.sinks is not None,
    )


def _run(kernel: Kernel, signature: AttentionSignature, arrays: AttentionArrays) -> jax.Array:
    if signature.cp_size == 1 and (kernel.explicit or jax.sharding.get_abstract_mesh().empty):
        whole = dataclasses.replace(arrays, places=jnp.asarray(arrays.places), tables=kernel.tables(signature))
        mixed = kernel.attend(whole, signature)
    else:
        mixed = _on_each_device(kernel, signature, arrays)
    return mixed if kernel.names_residuals and not signature.ring else checkpoint_name(mixed, "context")


def _on_each_device(kernel: Kernel, signature: AttentionSignature, arrays: AttentionArrays) -> jax.Array:
    """Run the kernel on each device's rows, heads and part of the length."""
    body = functools.partial(ring.on_one_device if signature.ring else all_gather.on_one_device, kernel, signature)
    heads = ("batch", "length", "heads", None)
    axes: dict[str, tuple[str | None, ...]] = {
        "q_btkqh": (*heads, None),
        "k_bskh": heads,
        "v_bskh": heads,
        "segments_bt": ("batch", "length"),
        "places": ("batch", "length")[-arrays.places.ndim :],
        "sinks_kq": ("heads", None),
    }
    given = {name: jnp.asarray(x) for name in axes if (x := getattr(arrays, name)) is not None}
    own: dict[str, Any] = {name: constrain(x, *axes[name]) for name, x in given.items()}
    specs: dict[str, Any] = {name: partition(*axes[name]) for name in given}
    length = partition("length")
    sequence_axis = length[0] if length else None
    tables = None if signature.ring else jax.tree.map(jnp.asarray, kernel.tables(signature))
    table_specs = jax.tree.map(
        lambda x: PartitionSpec(*(None,) * (x.ndim - 2), sequence_axis, *(None,) * (x.ndim > 1)), tables
    )
    own["tables"], specs["tables"] = jax.tree.map(jax.sharding.reshard, tables, table_specs), table_specs
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        body,
        in_specs=(AttentionArrays(**specs),),
        out_specs=specs["q_btkqh"],
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),  # axes of an enclosing pipeline are manual already
        check_vma=False,
    )(AttentionArrays(**own))
