"""The nearest (semi-)orthogonal matrices, by Newton-Schulz iterations: nothing but matrix products."""

import math

import jax
import jax.numpy as jnp

Coefficients = tuple[float, float, float]

# The quintic of Jordan et al. 2024 (Muon): steep at zero, singular values end up between 0.7 and 1.2.
JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    x: jax.Array, over: tuple[str, ...] = (), steps: int = 5, coefficients: Coefficients = JORDAN, eps: float = 1e-8
) -> jax.Array:
    """Newton-Schulz: X <- aX + (bA + cA^2)X with A = X X^T, from X / |X|.

    Args:
        x: [..., rows, columns], best with rows <= columns. The products have its type.
        over: inside `jax.shard_map`, the mesh axes by which the columns are cut: `x` is one device's part. The rows of
            A^2 are then shared out to the devices too, if they divide.
        steps: iterations.
        coefficients: a, b, c.
        eps: added to the norm.

    Returns:
        Like `x`: U V^T of its singular value decomposition, roughly (see `JORDAN`); the same for every stack entry
        alone.
    """
    a, b, c = coefficients
    x32 = x.astype(jnp.float32)
    norm = jnp.sqrt(_sum(jnp.sum(x32 * x32, axis=(-2, -1), keepdims=True), over))
    x = (x32 / (norm + eps)).astype(x.dtype)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        gram = _sum(x @ jnp.swapaxes(x, -1, -2), over)
        return a * x + _polynomial(gram, over, b, c) @ x, None

    return jax.lax.scan(step, x, length=steps)[0]


def _polynomial(gram: jax.Array, over: tuple[str, ...], b: float, c: float) -> jax.Array:
    """B A + c A^2, each device making some of the rows."""
    ways = math.prod(jax.lax.axis_size(name) for name in over)
    if ways == 1 or gram.shape[-2] % ways:
        return b * gram + c * (gram @ gram)
    size = gram.shape[-2] // ways
    rows = jax.lax.dynamic_slice_in_dim(gram, jax.lax.axis_index(over) * size, size, gram.ndim - 2)
    return jax.lax.all_gather(b * rows + c * (rows @ gram), over, axis=gram.ndim - 2, tiled=True)


def _sum(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, over) if over else x
