"""Matrices with factors of low rank: as a product of two, or with a product added, for all rows or for each its own.

Where every row of a batch adds its own product, several LoRA adapters are in one forward pass.

The way was chosen by counting. For r rows of one token, s adapters of rank l, and a matrix [d, o]:

* a gather of each row's factors moves r (d + o) l numbers, and 2 r (d + o) l FLOPs suffice;
* products with all adapters at once, masked to the row's own, move s (d + o) l numbers at s times the FLOPs: on a CPU,
  whose products with few rows are bound by FLOPs, 3 to 7 times the time of the first at s = 32;
* merging moves d o numbers for each adapter of a batch, and its rows are then multiplied apart.

So factors are gathered, by row and not by token, once for a whole dispatch of many tokens.

The best product of two narrow matrices in the place of a wide one, plain and whitened. Plain: the first singular
vectors, whose product has the least error |W - a b| of all of this rank (Eckart and Young 1936). Whitened: with inputs
X, the least error |X W - X a b| of the *outputs*, which is that of W in the norm of C = X^T X. With C = L L^T it is the
truncated decomposition of L^T W, with L^-T folded into the first factor (DRONE, Chen et al. 2021; SVD-LLM, Wang et al.
2024, arXiv 2403.07378).

Both need the leading eigenvectors of a Gram matrix on the shorter side alone, which costs a fraction of all singular
vectors of a matrix that is not square. On the side of the outputs these are eigenvectors of (X W)^T (X W), and nothing
is inverted: a = W V, b = V^T. Singular values that are smaller than the largest by the square root of the precision
are not told apart; what is lost with them is as small. At full rank the product is the matrix.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from axlearn_like.layers.wrappers.matrix_forms import MatrixForm
from mesh.rules import partition

BLOCK = 32  # tokens of a row multiplied at a time: XLA's CPU backend sums longer ones in another order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorisedMatrix(MatrixForm):
    """The product a b in the place of a matrix; `project` multiplies with a, then with b."""

    a: jax.Array  # [*in, rank]
    b: jax.Array  # [rank, *out]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix: [*in, *out]."""
        return (*self.a.shape[:-1], *self.b.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class AdaptedMatrix(MatrixForm):
    """A matrix with more than its own numbers, where a layer expects a parameter."""

    weight: jax.Array  # [*in, *out]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAdapted(AdaptedMatrix):
    """W + a[row] b[row] in the place of a matrix W, for `project`."""

    a: jax.Array  # [rows, in, rank], with the input axes merged
    b: jax.Array  # [rows, rank, out], with the output axes merged; scales are in it

    def update(self, x: jax.Array, in_axis: str | None, out_axis: str | None) -> jax.Array:
        """Return x a b, [rows, length, out], for x [rows, length, *in]; the axes are logical names of the first ones.

        On CPUs a token's result is the same to the bit whatever the other rows are and however the row was chunked.
        """
        rows, length = x.shape[:2]
        x = jnp.reshape(x, (rows, length, self.a.shape[1]), out_sharding=partition("batch", None, in_axis))

        def multiplied(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            low = jnp.einsum(
                "btd,bdl->btl",
                x,
                a.astype(x.dtype),
                preferred_element_type=jnp.float32,
                out_sharding=partition("batch", None, None),
            )
            spec = partition("batch", None, out_axis)
            return jnp.einsum("btl,blo->bto", low.astype(x.dtype), b.astype(x.dtype), out_sharding=spec)

        def in_blocks(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            if x.dtype == jnp.float32:
                x, a, b = _two_at_least(x, 1), _two_at_least(a, 2), _two_at_least(b, 1)
            if length == 1:
                return multiplied(x, a, b)[:, :1]
            if length <= BLOCK or length % BLOCK:
                return multiplied(x, a, b)
            parts = [multiplied(x[:, i : i + BLOCK], a, b) for i in range(0, length, BLOCK)]
            return jnp.concatenate(parts, axis=1)

        return jax.lax.platform_dependent(x, self.a, self.b, cpu=in_blocks, default=multiplied)


def _two_at_least(x: jax.Array, axis: int) -> jax.Array:
    """Pad an axis of length 1 with zeros: XLA's CPU backend sums products with a vector in another order."""
    return jnp.pad(x, [(0, 1 if i == axis and n == 1 else 0) for i, n in enumerate(x.shape)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AddedProduct(AdaptedMatrix):
    """W x + (x a) b in the place of W x, for `project`; with a key, dropout on the input of A alone, as PEFT has it.

    In float32 on CPUs, the numbers of `RowAdapted` with these factors to the bit, from 64 tokens on.
    """

    a: jax.Array  # [*in, rank]
    b: jax.Array  # [rank, *out], with the scale in it
    key: jax.Array | None = None  # key of the numbers of x that are kept; None: all are
    rate: float = dataclasses.field(default=0.0, metadata={"static": True})  # share of numbers that are dropped

    def dropped(self, x: jax.Array) -> jax.Array:
        """Return x with some numbers 0 and the others as much larger; x itself without a key."""
        if self.key is None:
            return x
        spec = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec
        kept = jax.random.bernoulli(self.key, 1.0 - self.rate, x.shape, out_sharding=spec)
        return jnp.where(kept, x / (1.0 - self.rate), jnp.zeros_like(x))


_KEY: ContextVar[jax.Array | None] = ContextVar("dropout_key", default=None)


@contextlib.contextmanager
def dropout_key(key: jax.Array) -> Iterator[None]:
    """Let layers traced within drop out, by this key: a train step does; without it nothing is dropped out."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


@contextlib.contextmanager
def dropout_layer(index: jax.Array | None) -> Iterator[None]:
    """Give the layer of this index in a stack a key of its own; None: nothing within has one."""
    key = _KEY.get()
    token = _KEY.set(None if key is None or index is None else jax.random.fold_in(key, index))
    try:
        yield
    finally:
        _KEY.reset(token)


def current_dropout_key() -> jax.Array | None:
    """Return the key of the layer that is being traced."""
    return _KEY.get()


DAMPING = 0.01  # share of an input's mean square, added to all: directions absent from X are kept as in plain SVD


def factorise(
    weight: jax.Array, rank: int, inputs: jax.Array | None = None, damping: float = DAMPING
) -> tuple[jax.Array, jax.Array]:
    """Return factors [in, rank] and [rank, out] of a matrix [in, out].

    Args:
        weight: the matrix, in float32 or float64.
        rank: at most the shorter side.
        inputs: activations [tokens, in] that the matrix is multiplied with; rows of zeros count for nothing. None: all
            inputs count alike.
        damping: the least square of an input that is assumed, as a share of the mean over all inputs.
    """
    with jax.default_matmul_precision("highest"):
        least = jnp.ones((), weight.dtype)
        if inputs is not None:
            inputs = inputs.astype(weight.dtype)
            least = damping * jnp.sum(inputs * inputs) / weight.shape[0] + jnp.finfo(weight.dtype).tiny
        if weight.shape[0] > weight.shape[1]:
            gram = least * weight.T @ weight
            if inputs is not None:
                outputs = inputs @ weight
                gram += outputs.T @ outputs
            vectors = _leading(gram, rank)
            return weight @ vectors, vectors.T
        if inputs is None:
            vectors = _leading(weight @ weight.T, rank)
            return vectors, vectors.T @ weight
        lower = jnp.linalg.cholesky(inputs.T @ inputs + least * jnp.eye(weight.shape[0], dtype=weight.dtype))
        whitened = lower.T @ weight
        vectors = _leading(whitened @ whitened.T, rank)
        a = jax.lax.linalg.triangular_solve(lower, vectors, left_side=True, lower=True, transpose_a=True)
        return a, vectors.T @ whitened


def smaller_rank(inputs: int, outputs: int, share: float) -> int:
    """Return the largest rank whose factors have at most a share of the numbers of a matrix [inputs, outputs].

    From 128 on it is a multiple of 128, the width of the matrix units and registers of TPUs.
    """
    rank = int(share * inputs * outputs / (inputs + outputs))
    return rank if rank < 128 else rank // 128 * 128


def _leading(gram: jax.Array, rank: int) -> jax.Array:
    """Return the eigenvectors [n, rank] of the largest eigenvalues, largest first."""
    return jnp.linalg.eigh(gram)[1][:, ::-1][:, :rank]
