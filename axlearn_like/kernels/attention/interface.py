"""The interface of an attention kernel: the signature by which it is chosen, and its protocol.

Shape letters: b batch, t queries, s keys, k key/value heads, q query heads per key/value head, h head width (values may
have another one).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.attention.shared_prefix import PrefixRows
from mesh.errors import UserError

MASKED = -1e30  # finite, so that a fully masked (padding) row gives a number instead of NaN
SEQUENCE = "sequence"  # the mesh axis that shards the tokens of a row
Layout = Literal["straight", "zigzag"]


@dataclasses.dataclass(frozen=True)
class ScoreRules:
    """Masks by position and what is done to scores (logits) before the softmax. Static."""

    causal: bool = True  # a query sees no key after it
    window: int | None = None  # a query sees itself and the `window - 1` keys before it (Mistral, Gemma); None: all
    soft_cap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118); None: unchanged
    scale: float | None = None  # scale of scores; None: head width ** -0.5

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"Attention.window={self.window}; expected 1 or more tokens, the query's own included")
        if self.window is not None and not self.causal:
            raise UserError("Attention.window looks back only; expected causal attention")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise UserError(f"Attention.soft_cap={self.soft_cap}; expected more than 0, or None")

    def scale_of(self, head_dim: int) -> float:
        """Return the factor of scores for heads of this width."""
        return head_dim**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class AttentionSignature:
    """The static facts by which a kernel is chosen. Sizes are global, not those of one device."""

    platform: str  # platform that runs the program: "tpu", "gpu", "cpu"
    dtype: np.dtype[Any]  # dtype of queries, keys and values
    length: int  # length of the rows; as many queries as keys
    kv_heads: int  # key/value heads
    per_kv: int  # query heads of each
    head_dim: int  # width of queries and keys
    value_dim: int  # width of values
    rules: ScoreRules  # masks and score transformations
    sinks: bool = False  # heads have a learned score that takes weight and contributes no value
    cp_size: int = 1  # devices that shard the length of a row (context-parallel size)
    layout: Layout = "straight"  # order of a row's tokens over these devices (see zigzag.py)
    ring: bool = False  # keys go around these devices, instead of being gathered
    # Shared prefix of rows that hold prompts and their completions; None: every token sees those before it
    shared_prefix: PrefixRows | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionArrays:
    """The arrays of an attention."""

    q_btkqh: jax.Array  # queries
    k_bskh: jax.Array  # keys
    v_bskh: jax.Array  # values
    segments_bt: jax.Array  # int32, segments of the queries; only equal ones see each other
    # int32 [t], the index of each query in its row; with `SharedPrefixes` and `SharedPrefixTrees` their codes, [b, t]
    places: Any
    sinks_kq: jax.Array | None = None  # scores of the sinks, or None
    tables: Any = None  # part of `Kernel.tables` for these queries
    segments_bs: jax.Array | None = None  # int32, segments of the keys; None: those of the queries

    @property
    def segments(self) -> tuple[jax.Array, jax.Array]:
        """The segments of queries and of keys."""
        return self.segments_bt, self.segments_bt if self.segments_bs is None else self.segments_bs

    @property
    def same_segment_bts(self) -> jax.Array:
        """True where a query and a key have the same segment."""
        queries, keys = self.segments
        return queries[:, :, None] == keys[:, None, :]


class KeyBlock(NamedTuple):
    """Some queries and a block of keys, heads before the length."""

    q_bkqth: jax.Array  # queries
    k_bksh: jax.Array  # keys
    v_bksh: jax.Array  # values
    segments: tuple[Any, Any]  # int32, [b, t] of the queries and [b, s] of the keys
    places: tuple[Any, Any]  # int32, [t] and [s], indices in their rows
    case: str  # "diagonal" if causal within itself; "whole" if fully visible, but for segments


class ContextParallelism(Configurable):
    """How devices that share a row exchange keys and values.

    All instances of a class are equal, so a jitted function is not traced again for another one.
    """

    ring: bool  # keys go around instead of being gathered

    def __init__(self, cfg: ConfigBase):
        del cfg

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Kernel(Configurable):
    """One way to compute attention. Static: equal configs make equal kernels.

    A kernel works on the arrays of one device: `dispatch.attend` shards them by batch and heads, and gathers keys over
    the length where that is sharded.
    """

    class Config(ConfigBase["Kernel"]):
        pass

    explicit = False  # True: takes arrays sharded over a mesh by batch and heads, too
    # It names the residuals of its backward pass `context` (see axlearn_like/remat.py): only then is it not recomputed
    # where a remat policy saves that name.
    names_residuals = False
    shared_prefixes = False  # `attend` does a signature with a shared_prefix; else the context mixes by XLA's products

    def __init__(self, cfg: Any):
        self.cfg = cfg

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and type(self) is type(other) and self.cfg == other.cfg

    def __hash__(self) -> int:
        return hash((type(self), repr(self.cfg)))

    def supported(self, signature: AttentionSignature) -> str | None:
        """Return why the kernel cannot compute this, or None if it can."""
        raise NotImplementedError

    def tables(self, signature: AttentionSignature) -> Any:
        """Return arrays that `attend` needs for each device's queries, or None.

        Their last but one axis, or the only one, is sharded as the queries are.
        """
        return None

    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        """Return mixed values [b, t, k, q, h] of some queries of rows whose keys are all present, in order."""
        raise NotImplementedError

    def blocks(self, signature: AttentionSignature) -> Any:
        """Return the forward and backward pass of one block of keys, for a ring (see `ring.BlockKernel`)."""
        raise NotImplementedError
