"""SOAP: Adam in the eigenbases of Shampoo's two sums of squared gradients, for one matrix."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import config_function


class Side(NamedTuple):
    """Moving average of G G^T (rows) or G^T G (columns), and its eigenvectors as columns; float32 [n, n] each."""

    gram: jax.Array
    basis: jax.Array


class SoapState(NamedTuple):
    """Number of updates; means of gradients and, in the bases, of their squares; sides, None where too long."""

    count: jax.Array
    mu: jax.Array
    nu: jax.Array
    left: Side | None
    right: Side | None


@config_function
def scale_by_soap(
    b1: float = 0.95, b2: float = 0.95, eps: float = 1e-8, every: int = 10, largest: int = 10_000
) -> optax.GradientTransformation:
    """Return SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3) of one matrix [rows, columns], for `Matrixwise`.

    The first gradient only determines the bases, so the first update is 0. All state is float32.

    Args:
        b1: decay of the mean of gradients.
        b2: decay of the mean of squares, and of both sides' sums.
        eps: added to the root of the mean of squares.
        every: updates between two rotations of the bases (a step of power iteration and a QR decomposition,
            algorithm 4).
        largest: a longer side keeps the identity as its basis.
    """

    def init(matrix: jax.Array) -> SoapState:
        sides = [None if n > largest else Side(jnp.zeros((n, n)), jnp.eye(n)) for n in matrix.shape]
        zeros = jnp.zeros(matrix.shape, jnp.float32)
        return SoapState(jnp.zeros((), jnp.int32), zeros, zeros, *sides)

    def update(gradient: jax.Array, state: SoapState, matrix: jax.Array | None = None) -> tuple[jax.Array, SoapState]:
        del matrix
        g = gradient.astype(jnp.float32)
        left = _gathered(state.left, g, b2)
        right = _gathered(state.right, g.T, b2)
        continued = partial(_continue, b1=b1, b2=b2, eps=eps, every=every)
        made, state = jax.lax.cond(state.count == 0, _begin, continued, g, state._replace(left=left, right=right))
        return made.astype(gradient.dtype), state._replace(count=state.count + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _begin(g: jax.Array, state: SoapState) -> tuple[jax.Array, SoapState]:
    """Return the first bases, the largest eigenvalues first."""

    def solved(side: Side | None) -> Side | None:
        return None if side is None else side._replace(basis=jnp.linalg.eigh(side.gram)[1][:, ::-1])

    return jnp.zeros_like(g), state._replace(left=solved(state.left), right=solved(state.right))


def _continue(
    g: jax.Array, state: SoapState, b1: float, b2: float, eps: float, every: int
) -> tuple[jax.Array, SoapState]:
    mu = b1 * state.mu + (1 - b1) * g
    nu = b2 * state.nu + (1 - b2) * jnp.square(_into(g, state))
    steps = state.count.astype(jnp.float32)  # the first update is 0
    mean, square = _into(mu, state) / (1 - b1**steps), nu / (1 - b2**steps)
    made = _out_of(mean / (jnp.sqrt(square) + eps), state)
    state = state._replace(mu=mu, nu=nu)
    return made, jax.lax.cond(state.count % every == 0, _rotated, lambda state: state, state)


def _rotated(state: SoapState) -> SoapState:
    """Return the bases after a step of power iteration; directions, with their squares, are sorted by weight."""
    nu, sides = state.nu, []
    for axis, side in enumerate((state.left, state.right)):
        if side is not None:
            weights = jnp.einsum("ij,ij->j", side.basis, _times(side.gram, side.basis))
            order = jnp.argsort(-weights)
            nu = jnp.take(nu, order, axis)
            side = side._replace(basis=jnp.linalg.qr(_times(side.gram, side.basis[:, order]))[0])
        sides.append(side)
    return state._replace(nu=nu, left=sides[0], right=sides[1])


def _gathered(side: Side | None, g: jax.Array, b2: float) -> Side | None:
    return None if side is None else side._replace(gram=b2 * side.gram + (1 - b2) * _times(g, g.T))


def _into(x: jax.Array, state: SoapState) -> jax.Array:
    x = x if state.left is None else _times(state.left.basis.T, x)
    return x if state.right is None else _times(x, state.right.basis)


def _out_of(x: jax.Array, state: SoapState) -> jax.Array:
    x = x if state.left is None else _times(state.left.basis, x)
    return x if state.right is None else _times(x, state.right.basis.T)


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
