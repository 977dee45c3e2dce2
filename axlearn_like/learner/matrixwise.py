"""Optimizers made for single matrices, on stacks of them that are spread over devices."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.learner.kinds import Matrices, MatrixAxes, matrix_labels, path_name
from axlearn_like.learner.optimizers import AdamW, built_direction, decay_mask
from axlearn_like.learner.spread import Plan, is_spread, make_plan


class Matrixwise(Configurable):
    """A transformation of optax or of another library, applied to every matrix [inputs, outputs] by itself.

        Matrixwise.Config(direction=config_for(optax.contrib.scale_by_muon, preconditioning="aol"))

    For methods of second order (Shampoo, SOAP, GaLore ...), which keep matrices of state for each matrix of weights:
    the stack is spread over the devices, so that each computes whole matrices, and their state lies there. Mesh axes
    that do not divide the stack compute the same, and hold the same state. `others` is for embeddings, heads, scales,
    biases and the rest.
    """

    class Config(ConfigBase["Matrixwise"]):
        direction: ConfigBase = REQUIRED
        weight_decay: float = 0.0
        matrices: Matrices.Config = Matrices.Config()
        others: ConfigBase = AdamW.Config()

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._direction = built_direction(cfg, cfg.direction)
        self._matrices: Matrices = cfg.matrices.build()
        self._others = cfg.others.build()

    def transformation(self) -> optax.GradientTransformation:
        """The un-scaled direction as an optax transformation."""
        matrices = optax.chain(
            optax.GradientTransformation(self._init, self._update),
            optax.add_decayed_weights(self._cfg.weight_decay, mask=decay_mask),
        )
        return optax.partition({"matrices": matrices, "others": self._others.transformation()}, matrix_labels)

    def _axes(self, path: tuple[Any, ...], x: jax.Array) -> MatrixAxes:
        axes = self._matrices.axes(path_name(path), x.ndim)
        assert axes is not None, "every matrix has axes"
        return axes

    def _init(self, params: Any) -> Any:
        def one(path: tuple[Any, ...], p: jax.Array) -> Any:
            axes = self._axes(path, p)
            plan = make_plan(p, axes, whole=True)

            def body(p: jax.Array) -> Any:
                return _over_stack(self._direction.init, axes)(plan.gather(p))

            return _on_devices(body, plan, plan.spec, plan.stack_spec)(p)

        return jax.tree_util.tree_map_with_path(one, params)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(path: tuple[Any, ...], g: jax.Array, state: Any, p: jax.Array) -> Any:
            axes = self._axes(path, g)
            plan = make_plan(g, axes, whole=True)

            def body(g: jax.Array, state: Any, p: jax.Array) -> Any:
                update, state = _over_stack(self._direction.update, axes)(plan.gather(g), state, plan.gather(p))
                return plan.scatter(update, g), state

            ins, outs = (plan.spec, plan.stack_spec, plan.spec), (plan.spec, plan.stack_spec)
            return _on_devices(body, plan, ins, outs)(g, state, p)

        both = jax.tree_util.tree_map_with_path(one, updates, state, params)
        made, state = (jax.tree.map(lambda _, pair, i=i: pair[i], updates, both) for i in (0, 1))
        return made, state


def _over_stack(function: Callable[..., Any], axes: MatrixAxes) -> Callable[..., Any]:
    """`function` of one matrix, for arrays of them."""
    for _ in axes.stack:
        function = jax.vmap(function)
    return function


def _on_devices(body: Callable[..., Any], plan: Plan, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    if not is_spread(plan):
        return body
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=False)
