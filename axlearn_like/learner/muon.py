"""Muon: momentum whose matrices are made orthogonal before they are applied."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.learner.distributed_matrices import on_matrices
from axlearn_like.learner.errors import check
from axlearn_like.learner.newton_schulz import JORDAN, orthogonalize
from axlearn_like.learner.optimizers import AdamW, check_betas, decay_mask
from axlearn_like.learner.param_labels import Matrices, MatrixAxes, matrix_labels, path_name


class MuonState(NamedTuple):
    """Number of updates and the momentum of the matrices."""

    count: jax.Array
    mu: Any


class Muon(Configurable):
    """Muon (Jordan et al. 2024) for weight matrices, `others` for embeddings, heads, scales, biases and the rest.

    With `update_rms` a matrix's update has this root mean square, as an AdamW update about has (Liu et al. 2025, arXiv
    2502.16982): learning rate and weight decay of AdamW can be kept. None: it is multiplied by
    sqrt(max(1, outputs / inputs)), as Jordan does.

    optax.contrib.muon is the same for single matrices (tests compare the two), but its products are refused by
    explicit sharding, and its state would hold one transposed copy.
    """

    class Config(ConfigBase["Muon"]):
        beta: float = 0.95
        nesterov: bool = True
        steps: int = 5
        coefficients: tuple[float, float, float] = JORDAN
        eps: float = 1e-8
        update_rms: float | None = 0.2
        weight_decay: float = 0.0
        dtype: Literal["float32", "bfloat16"] = "float32"  # of the iteration; Jordan: bfloat16
        matrices: Matrices.Config = Matrices.Config()
        others: ConfigBase = AdamW.Config()

    def __init__(self, cfg: Config):
        check_betas(cfg, "beta")
        check(cfg, "steps", cfg.steps >= 1, "1 or more")
        check(cfg, "update_rms", cfg.update_rms is None or cfg.update_rms > 0, "above 0, or None")
        self._cfg = cfg
        self._matrices: Matrices = cfg.matrices.build()
        self._others = cfg.others.build()

    def transformation(self) -> optax.GradientTransformation:
        """The un-scaled direction as an optax transformation."""
        matrices = optax.chain(
            optax.GradientTransformation(self._init, self._update),
            optax.add_decayed_weights(self._cfg.weight_decay, mask=decay_mask),
        )
        return optax.partition({"matrices": matrices, "others": self._others.transformation()}, matrix_labels)

    def _init(self, params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        beta, count = self._cfg.beta, state.count + 1
        mu = jax.tree.map(lambda g, m: ((1 - beta) * g + beta * m).astype(m.dtype), updates, state.mu)
        if self._cfg.nesterov:  # as optax has it: the momentum that the next update would have, were the gradient 0
            weight_mu, weight_g = beta / (1 - beta ** (count + 1)), (1 - beta) / (1 - beta**count)
            direction = jax.tree.map(lambda m, g: weight_mu * m + weight_g * g, mu, updates)
        else:
            direction = jax.tree.map(lambda m: m / (1 - beta**count), mu)
        return jax.tree_util.tree_map_with_path(self._orthogonal, direction), MuonState(count, mu)

    def _orthogonal(self, path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        cfg, axes = self._cfg, self._matrices.axes(path_name(path), x.ndim)
        assert axes is not None, "every matrix has axes"

        def function(matrices: jax.Array, over: tuple[str, ...]) -> jax.Array:
            return orthogonalize(matrices.astype(cfg.dtype), over, cfg.steps, cfg.coefficients, cfg.eps)

        return on_matrices(x, axes, function).astype(x.dtype) * self._scale(x.shape, axes)

    def _scale(self, shape: tuple[int, ...], axes: MatrixAxes) -> float:
        inputs, outputs = (math.prod(shape[axis] for axis in side) for side in (axes.inputs, axes.outputs))
        if self._cfg.update_rms is None:
            return max(1.0, outputs / inputs) ** 0.5
        return self._cfg.update_rms * max(inputs, outputs) ** 0.5
