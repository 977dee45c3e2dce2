"""Muon: momentum whose matrices are orthogonalised before they are applied.

Not `optax.contrib.muon` (0.2.8): under explicit sharding its products raise ShardingTypeError, and its state holds a
transposed copy. For single matrices on one device the updates are equal (tests compare the two).
"""

import math
from typing import Any, Literal, NamedTuple, override

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import ConfigBase
from axlearn_like.layers.parameter_names import MatrixAxes
from axlearn_like.learner.optimizers.distributed_matrices import on_matrices
from axlearn_like.learner.optimizers.elementwise import AdamW, DecayedMatrices, check_betas
from axlearn_like.learner.param_labels import Matrices

Coefficients = tuple[float, float, float]

# The quintic of Jordan et al. 2024 (Muon): steep at zero, singular values end up between 0.7 and 1.2.
JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """Number of updates and the momentum of the matrices."""

    count: jax.Array
    mu: Any


class Muon(DecayedMatrices):
    """Muon (Jordan et al. 2024) for weight matrices, `others` for embeddings, heads, scales, biases and the rest.

    With `update_rms` a matrix's update has this root mean square, about that of an AdamW update (Liu et al. 2025, arXiv
    2502.16982): learning rate and weight decay of AdamW can be kept. None: it is multiplied by
    sqrt(max(1, outputs / inputs)), as Jordan does.
    """

    class Config(ConfigBase["Muon"]):
        beta: float = 0.95
        nesterov: bool = True
        steps: int = 5
        coefficients: tuple[float, float, float] = JORDAN
        eps: float = 1e-8
        update_rms: float | None = 0.2
        weight_decay: float = 0.0
        dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the Newton-Schulz iteration; Jordan: bfloat16
        matrices: Matrices.Config = Matrices.Config()
        others: ConfigBase = AdamW.Config()

        @override
        def check_fields(self) -> None:
            check_betas(self, "beta")
            self.require("steps", self.steps >= 1, "1 or more")
            self.require("update_rms", self.update_rms is None or self.update_rms > 0, "above 0, or None")

    @override
    def direction(self) -> optax.GradientTransformation:
        init = lambda params: MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))  # noqa: E731
        return optax.GradientTransformation(init, self._update)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        beta, count = self._cfg.beta, state.count + 1
        mu = jax.tree.map(lambda g, m: ((1 - beta) * g + beta * m).astype(m.dtype), updates, state.mu)
        if self._cfg.nesterov:  # same as optax: the next update's momentum with a zero gradient
            weight_mu, weight_g = beta / (1 - beta ** (count + 1)), (1 - beta) / (1 - beta**count)
            direction = jax.tree.map(lambda m, g: weight_mu * m + weight_g * g, mu, updates)
        else:
            direction = jax.tree.map(lambda m: m / (1 - beta**count), mu)
        return jax.tree_util.tree_map_with_path(self._orthogonal, direction), MuonState(count, mu)

    def _orthogonal(self, path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        cfg, axes = self._cfg, self.axes(path, x)

        def function(matrices: jax.Array, over: tuple[str, ...]) -> jax.Array:
            return orthogonalize(matrices.astype(cfg.dtype), over, cfg.steps, cfg.coefficients, cfg.eps)

        return on_matrices(x, axes, function).astype(x.dtype) * self._scale(x.shape, axes)

    def _scale(self, shape: tuple[int, ...], axes: MatrixAxes) -> float:
        inputs, outputs = (math.prod(shape[axis] for axis in side) for side in (axes.inputs, axes.outputs))
        if self._cfg.update_rms is None:
            return max(1.0, outputs / inputs) ** 0.5
        return self._cfg.update_rms * max(inputs, outputs) ** 0.5


def orthogonalize(
    x: jax.Array, over: tuple[str, ...] = (), steps: int = 5, coefficients: Coefficients = JORDAN, eps: float = 1e-8
) -> jax.Array:
    """Return the nearest (semi-)orthogonal matrices by Newton-Schulz iterations: only matrix products.

    X <- aX + (bA + cA^2)X with A = X X^T, from X / |X|.

    Args:
        x: [..., rows, columns], best with rows <= columns. The products have its type.
        over: inside `jax.shard_map`, the mesh axes that shard the columns: `x` is one device's part. The rows of A^2
            are then divided among the devices too, if possible.
        coefficients: a, b, c.

    Returns:
        Like `x`: approximately U V^T of its singular value decomposition (see `JORDAN`), for every matrix of the stack.
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
    """Return b A + c A^2, each device computing some of the rows."""
    shards = math.prod(jax.lax.axis_size(name) for name in over)
    if shards == 1 or gram.shape[-2] % shards:
        return b * gram + c * (gram @ gram)
    size = gram.shape[-2] // shards
    rows = jax.lax.dynamic_slice_in_dim(gram, jax.lax.axis_index(over) * size, size, gram.ndim - 2)
    return jax.lax.all_gather(b * rows + c * (rows @ gram), over, axis=gram.ndim - 2, tiled=True)


def _sum(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, over) if over else x
