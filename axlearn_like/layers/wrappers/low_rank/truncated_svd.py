"""The best product of two narrow matrices in the place of a wide one, plain and whitened.

Plain: the first singular vectors, whose product has the least error |W - a b| of all of this rank (Eckart and Young
1936). Whitened: with inputs X, the least error |X W - X a b| of the *outputs*, which is that of W in the norm of
C = X^T X. With C = L L^T it is the truncated decomposition of L^T W, with L^-T folded into the first factor (DRONE,
Chen et al. 2021; SVD-LLM, Wang et al. 2024, arXiv 2403.07378).

Both need the leading eigenvectors of a Gram matrix on the shorter side alone, which costs a fraction of all singular
vectors of a matrix that is not square. On the side of the outputs these are eigenvectors of (X W)^T (X W), and nothing
is inverted: a = W V, b = V^T. Singular values that are smaller than the largest by the square root of the precision
are not told apart; what is lost with them is as small. At full rank the product is the matrix.
"""

import jax
import jax.numpy as jnp

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
