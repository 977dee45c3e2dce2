"""Optimizers for single matrices, applied to stacks of them that are sharded over devices."""

import math
from collections.abc import Callable
from typing import Any, override

import jax
import optax
from jax.sharding import PartitionSpec

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.layers.parameter_names import MatrixAxes, path_name
from axlearn_like.learner.optimizers.distributed_matrices import GatherPlan, is_sharded, make_plan
from axlearn_like.learner.optimizers.elementwise import AdamW, DecayedMatrices, built_direction
from axlearn_like.learner.param_labels import Matrices


class Matrixwise(DecayedMatrices):
    """A transformation of optax or of another library, applied to every matrix [inputs, outputs] alone.

        Matrixwise.Config(direction=config_for(scale_by_soap, every=20))

    For second-order methods (SOAP, Shampoo, GaLore ...), which keep matrices of state for each matrix of weights: the
    stack is sharded over the devices, so that each computes complete matrices, and their state is stored there. Mesh
    axes that do not divide the stack compute the same, and hold the same state. A scalar of state called `count`, as
    optax names it, is shared by the whole stack: what is done every so often is done for all matrices at once. `others`
    is for embeddings, heads, scales, biases and the rest.
    """

    class Config(ConfigBase["Matrixwise"]):
        direction: ConfigBase = REQUIRED
        weight_decay: float = 0.0
        matrices: Matrices.Config = Matrices.Config()
        others: ConfigBase = AdamW.Config()

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._direction = built_direction(cfg, cfg.direction)

    @override
    def direction(self) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, self._update)

    def _init(self, params: Any) -> Any:
        def one(path: tuple[Any, ...], p: jax.Array) -> Any:
            axes = self.axes(path, p)
            plan, kept = make_plan(p, axes, complete=True), self._kept(p, axes)

            def body(p: jax.Array) -> Any:
                return _over_stack(self._direction.init, axes, 0, kept)(plan.gather(p))

            return _on_devices(body, plan, plan.spec, _specs(kept, plan))(p)

        return jax.tree_util.tree_map_with_path(one, params)

    def _update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(path: tuple[Any, ...], g: jax.Array, state: Any, p: jax.Array) -> Any:
            axes = self.axes(path, g)
            plan, kept = make_plan(g, axes, complete=True), self._kept(g, axes)

            def body(g: jax.Array, state: Any, p: jax.Array) -> Any:
                update = _over_stack(self._direction.update, axes, (0, kept, 0), (0, kept))
                made, state = update(plan.gather(g), state, plan.gather(p))
                return plan.scatter(made, g), state

            specs = _specs(kept, plan)
            return _on_devices(body, plan, (plan.spec, specs, plan.spec), (plan.spec, specs))(g, state, p)

        both = jax.tree_util.tree_map_with_path(one, updates, state, params)
        made, state = (jax.tree.map(lambda _, pair, i=i: pair[i], updates, both) for i in (0, 1))
        return made, state

    def _kept(self, x: jax.Array, axes: MatrixAxes) -> Any:
        """Return, for every array of the state of one matrix, 0 if each matrix of the stack has its own, else None."""
        shape = tuple(math.prod(x.shape[axis] for axis in side) for side in (axes.inputs, axes.outputs))
        state = jax.eval_shape(self._direction.init, jax.ShapeDtypeStruct(shape, x.dtype))

        def own(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> int | None:
            return None if not leaf.ndim and path_name(path).endswith("count") else 0

        return jax.tree_util.tree_map_with_path(own, state)


def _over_stack(function: Callable[..., Any], axes: MatrixAxes, ins: Any, outs: Any) -> Callable[..., Any]:
    """Return `function` of one matrix, mapped over a stack; `ins` and `outs` as in `jax.vmap`."""
    for _ in axes.stack:
        function = jax.vmap(function, in_axes=ins, out_axes=outs)
    return function


def _specs(kept: Any, plan: GatherPlan) -> Any:
    one = lambda own: PartitionSpec() if own is None else plan.stack_spec  # noqa: E731
    return jax.tree.map(one, kept, is_leaf=lambda own: own is None)


def _on_devices(body: Callable[..., Any], plan: GatherPlan, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    if not is_sharded(plan):
        return body
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=False)
