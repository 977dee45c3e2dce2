"""Attention behind one interface: the first kernel that can do it, on arrays spread over the mesh as they are."""

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
from axlearn_like.kernels.attention.interface import Call, Kernel, Layout, Rules
from axlearn_like.kernels.attention.shared_prefix import Tree
from axlearn_like.kernels.attention.splash import Splash
from axlearn_like.kernels.attention.xla import Xla
from axlearn_like.remat import named
from mesh.devices import platform
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain, partition

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A kernel, and why not those before it."""

    kernel: Kernel
    refused: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"not {name}: {why}" for name, why in self.refused.items())
        return type(self.kernel).__name__ + (f" ({others})" if others else "")


class FirstSupported(Kernel):
    """The first of several kernels that can do what is asked. Put one kernel in its place to force that."""

    class Config(ConfigBase["FirstSupported"]):
        kernels: tuple[ConfigBase, ...] = (Splash.Config(), Cudnn.Config(), Xla.Config())

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.kernels: tuple[Kernel, ...] = tuple(kernel.build() for kernel in cfg.kernels)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """What an attention layer tells a context of how to mix values.

    Attributes:
        rules: see `Rules`.
        kernel: one, or `FirstSupported`.
        sequence: `AllGather` or `Ring`, for meshes that cut the length.
        sinks: float32 [k, q], or None.
    """

    rules: Rules
    kernel: Kernel
    sequence: Any
    sinks: jax.Array | None = None


def choose(kernel: Kernel, call: Call) -> Choice:
    """The kernel for a call.

    Raises:
        UserError: none can do it; it says why, kernel by kernel.
    """
    candidates = kernel.kernels if isinstance(kernel, FirstSupported) else (kernel,)
    refused = {}
    for one in candidates:
        why = one.supported(call)
        if why is None:
            return Choice(one, refused)
        refused[type(one).__name__] = why
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    raise UserError(f"Attention.kernel: no kernel can do this attention ({reasons})")


@functools.lru_cache(maxsize=256)
def _chosen(kernel: Kernel, call: Call) -> Kernel:
    """`choose`, told once for each call."""
    choice = choose(kernel, call)
    _log.info(
        "attention of %d tokens, heads %d x %d of %d, %s: %s",
        *(call.length, call.kv_heads, call.per_kv, call.head_dim, call.platform, choice),
    )
    return choice.kernel


def explain(attention: Any, *, platform: str, dtype: Any, length: int, ways: int = 1) -> Choice:
    """Which kernel an attention layer gets for packed rows, and why not another.

    Args:
        attention: a layer with `query_shape` (k, q, h), `value_dim`, `rules`, `kernel`, `sequence` and `sinks_kq`.
        platform: "tpu", "gpu" or "cpu".
        dtype: of activations.
        length: tokens of a row.
        ways: devices over which rows are cut.

    Raises:
        UserError: no kernel can do it.
    """
    kv_heads, per_kv, head_dim = attention.query_shape
    call = Call(
        *(platform, np.dtype(dtype), length, kv_heads, per_kv, head_dim, attention.value_dim, attention.rules),
        sinks=attention.sinks_kq is not None,
        ways=ways,
        layout="zigzag" if ways > 1 else "straight",
        ring=ways > 1 and attention.sequence.ring,
    )
    zigzag.order(length, ways, call.layout)
    return choose(attention.kernel, call)


def attend(
    q_btkqh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    mixing: Mixing,
    *,
    segment_ids: jax.Array,
    layout: Layout = "straight",
) -> jax.Array:
    """Attention of packed rows to themselves, [b, t, k, q, h], spread as the queries are.

    Args:
        q_btkqh: queries.
        k_btkh: keys.
        v_btkh: values; their width may be another.
        mixing: how.
        segment_ids: int32 [b, t]; tokens see those of their own segment only, in the order in which they stand.
        layout: in which order rows lie on the devices of the mesh's sequence axis, if there are several.

    Raises:
        UserError: no kernel can do it, or rows cannot be cut over the mesh.
    """
    ways = axis_sizes("length").get("sequence", 1)
    call = _described(q_btkqh, v_btkh, mixing)
    call = dataclasses.replace(
        call, ways=ways, layout=layout if ways > 1 else "straight", ring=ways > 1 and mixing.sequence.ring
    )
    return _run(_chosen(mixing.kernel, call), call, mixing, q_btkqh, k_btkh, v_btkh, segment_ids)


def attend_tree(
    q_btkqh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, mixing: Mixing, *, tree: Tree, live_bt: jax.Array
) -> jax.Array | None:
    """Attention of rows that hold a prompt and its answers, as `attend`; None where the kernel taken has none of it.

    Args:
        q_btkqh: queries, t being `tree.length`.
        k_btkh: keys.
        v_btkh: values.
        mixing: how.
        tree: what a token sees by its place.
        live_bt: bool [b, t]; what is False is padding, seen by other padding only.

    Raises:
        UserError: no kernel can do it.
    """
    call = dataclasses.replace(_described(q_btkqh, v_btkh, mixing), tree=tree)
    kernel = _chosen(mixing.kernel, call)
    if not kernel.trees:
        return None
    return _run(kernel, call, mixing, q_btkqh, k_btkh, v_btkh, live_bt.astype(jnp.int32))


def _described(q_btkqh: jax.Array, v_btkh: jax.Array, mixing: Mixing) -> Call:
    """Of rows in one piece."""
    return Call(
        platform=platform(),
        dtype=np.dtype(q_btkqh.dtype),
        length=q_btkqh.shape[1],
        kv_heads=q_btkqh.shape[2],
        per_kv=q_btkqh.shape[3],
        head_dim=q_btkqh.shape[4],
        value_dim=v_btkh.shape[-1],
        rules=mixing.rules,
        sinks=mixing.sinks is not None,
    )


def _run(
    kernel: Kernel, call: Call, mixing: Mixing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array
) -> jax.Array:
    places = zigzag.order(call.length, call.ways, call.layout)
    if call.ways == 1 and (kernel.explicit or jax.sharding.get_abstract_mesh().empty):
        mixed = kernel.attend(
            *(q, k, v, call),
            segments=(segments, segments),
            places_t=jnp.asarray(places),
            sinks_kq=mixing.sinks,
            tables=kernel.tables(call),
        )
    else:
        mixed = _on_each_device(kernel, call, mixing, q, k, v, segments, places)
    return mixed if kernel.named and not call.ring else named(mixed, "context")


def _on_each_device(
    kernel: Kernel,
    call: Call,
    mixing: Mixing,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    places: np.ndarray,
) -> jax.Array:
    """Every device works on its rows, its heads and its part of the length."""
    body = functools.partial(ring.on_one_device if call.ring else all_gather.on_one_device, kernel, call)
    heads = ("batch", "length", "heads", None)
    axes = ((*heads, None), heads, heads, ("batch", "length"), ("length",))
    args = [constrain(x, *names) for x, names in zip((q, k, v, segments, jnp.asarray(places)), axes, strict=True)]
    specs: list[Any] = [partition(*names) for names in axes]
    sinks = None if mixing.sinks is None else constrain(mixing.sinks, "heads", None)
    length = partition("length")
    cut = length[0] if length else None
    tables = None if call.ring else jax.tree.map(jnp.asarray, kernel.tables(call))
    table_specs = jax.tree.map(lambda x: PartitionSpec(*(None,) * (x.ndim - 2), cut, *(None,) * (x.ndim > 1)), tables)
    rest = [sinks, jax.tree.map(jax.sharding.reshard, tables, table_specs)]
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        body,
        in_specs=(*specs, None if sinks is None else partition("heads", None), table_specs),
        out_specs=specs[0],
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),  # a pipeline has taken its own
        check_vma=False,
    )(*args, *rest)
