"""Model FLOPs: what a model's mathematics asks for, whatever a program recomputes or wastes.

A multiplication with an addition counts two. Only matrix products count, and each layer counts its own
(`Layer.flops`): those with weights, and the two of attention, per pair of a query and a key that it may see (so causal
attention over n tokens counts n (n + 1) / 2 pairs: the causal factor is one half, exactly). Norms, activations,
rotations and the optimizer do not count. The backward pass counts twice the forward pass. This is the count of PaLM
(arXiv 2204.02311, appendix B) but for the causal half.
"""

import math
from functools import partial
from typing import Any

import jax
from flax import nnx

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import Layer, Workload, build_abstract, split
from mesh.errors import UserError


def causal_pairs(rows: int, length: int, window: int | None = None) -> float:
    """Return the pairs of a query and a key in `rows` rows of `length` tokens that are not packed.

    Args:
        window: tokens that a query sees, its own included; None: all before it.
    """
    seen = min(window or length, length)
    return rows * (seen * (seen + 1) / 2 + (length - seen) * seen)


def rows_workload(rows: int, length: int) -> Workload:
    """Return the work of a forward pass over rows that are not packed, with logits of every token."""
    return Workload(rows * length, rows * length, partial(causal_pairs, rows, length))


def shared_prompt_workload(groups: int, prefix: int, samples: int, length: int) -> Workload:
    """Return the work of prompts of `prefix` tokens, each computed once for its `samples` completions of `length`."""
    completions = groups * samples * length

    def pairs(window: int | None) -> float:
        seen = min(prefix, window or prefix)  # prompt tokens seen by a token of a completion
        inside = causal_pairs(groups, prefix, window) + causal_pairs(groups * samples, length, window)
        return inside + completions * seen

    return Workload(groups * prefix + completions, completions, pairs)


def model_flops(model: ConfigBase[Any], work: Workload, *, backward: bool = False) -> float:
    """Return the FLOPs of one pass over tokens, on all devices together.

    Args:
        model: config of a `Layer`.
        backward: count the gradients too.

    Raises:
        UserError: the config builds something else.
    """
    found: list[float] = []

    def count() -> None:  # traces parameters: nothing is allocated
        layer = model.build(rngs=nnx.Rngs(0))
        if not isinstance(layer, Layer):
            raise UserError(f"FLOPs: expected the config of a Layer, got one of {type(layer).__qualname__}")
        found.append(layer.flops(work))

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # no mesh: shapes alone count
        jax.eval_shape(count)
    return found[0] * (3 if backward else 1)


def active_weights(model: ConfigBase[Any]) -> float:
    """Return how many numbers in its matrices each token is multiplied with, those of the head included."""
    return model_flops(model, Workload(1, 1, lambda window: 0.0)) / 2


def count_parameters(model: ConfigBase[Any]) -> int:
    """Return the number of parameters of a layer's config, without allocating any; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(split(build_abstract(model))[1]))
