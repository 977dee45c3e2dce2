"""Arrays of blocks that the backward pass finds stored, by the memory that a train step leaves.

    remat_by_memory(sizes, way, 4096, 102e9)  # {"routing": "save", "context": "save", ...}

The arrays that save the most seconds for a byte come first: attention's results, whose kernel would run again, then the
results of matrix products. Queries and keys are no choice: a norm behind their products needs what was before it.
"""

import dataclasses
from typing import NamedTuple

from axlearn_like.remat import Remat
from experiments.recipes.sizes import ModelSizes, TrainingWay, training_bytes
from mesh.cost.roofline import KERNEL_EFFICIENCY, MATRIX_EFFICIENCY

# Share of a device's memory, as sold, up to which arrays are stored: the sum is the compiler's peak or somewhat more.
STORED = 0.9


class _Array(NamedTuple):
    name: str
    numbers: int  # numbers of a token and layer
    work: float  # FLOPs of a token and layer that recomputing takes, at the peak


def remat_by_memory(sizes: ModelSizes, way: TrainingWay, length: int, memory: float) -> Remat:
    """Return the arrays to store for the backward pass.

    Args:
        sizes: those of the model.
        way: how it is trained; what it says of arrays that are kept is no matter.
        length: tokens of a row.
        memory: bytes of a device, as sold.
    """
    names, numbers = ["routing"] if sizes.experts else [], 0  # a few integers, for a sort of all rows
    for array in sorted(_arrays(sizes, length), key=lambda one: one.numbers / one.work):
        more = dataclasses.replace(way, keeps=False, others=numbers + array.numbers)
        if sum(training_bytes(sizes, more).values()) <= STORED * memory:
            names, numbers = [*names, array.name], numbers + array.numbers
    return dict.fromkeys(names, "save")


def _arrays(sizes: ModelSizes, length: int) -> list[_Array]:
    dim, context, hidden = sizes.dim, sizes.context, sizes.hidden
    product = 2 / MATRIX_EFFICIENCY
    return [
        _Array("context", context, 2 * length * context / KERNEL_EFFICIENCY),  # the causal half of two products
        _Array("attention_out", dim, product * context * dim),
        _Array("gate", hidden, product * dim * hidden),
        _Array("up", hidden, product * dim * hidden),
    ]
