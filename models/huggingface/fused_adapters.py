"""Factors of matrices that are one linear layer in PEFT: k_up and v_up of latent attention are its `kv_b_proj`.

A layer of PEFT has one factor A, each matrix of ours its own. Where they are equal, they are the layer's. Where they
differ, as they do after training, the layer gets a rank for each: A has the rows of all, B a block for each and zeros,
and `rank_pattern` and `alpha_pattern` name the layer. So it is with the gates and the up projections of experts that
are one parameter in transformers.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, override

import numpy as np

from models.huggingface.rows import ConversionError, Tensor
from models.huggingface.tensor_files.packed import ComputedTensor, TensorSource
from models.huggingface.tensor_files.safetensors import Stored

A, B = ".lora_A.weight", ".lora_B.weight"


def ranks(expected: Mapping[str, Tensor], name: str) -> int:
    """Return the number of ranks in a tensor: one, or, in a wide B, one for each matrix of its layer."""
    if not name.endswith(B):
        return 1
    pieces = expected[name.removesuffix(B) + A].pieces
    return len(pieces) if len(pieces) > 1 and pieces[0].run is not None else 1


def wide_shape(expected: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a tensor in PEFT: a wide B has a block of columns for each rank."""
    *first, last = expected[name].shape
    return (*first, last * ranks(expected, name))


def widen(tensor: Tensor, narrow: np.ndarray) -> np.ndarray:
    """Return the factor B of a layer with a rank for each matrix: its columns for each, and zeros for the others."""
    owner = _owner(tensor)[:, None]
    return np.concatenate([np.where(owner == part, narrow, 0) for part in range(len(tensor.pieces))], axis=1)


def narrow(name: str, tensor: Tensor, wide: np.ndarray) -> np.ndarray:
    """Return the factors B of the matrices, side by side as in `tensor`: the inverse of `widen`.

    Raises:
        ConversionError: an output has numbers other than zeros in the rank of another matrix.
    """
    owner, count = _owner(tensor), len(tensor.pieces)
    blocks = wide.reshape(len(wide), count, -1)
    others = np.arange(count) != owner[:, None]
    if np.any(blocks[others] != 0):
        raise ConversionError(
            f"{name}: {count} times the rank of the other layers, with outputs of which each has all of it; expected "
            f"zeros outside of the blocks of the {count} matrices of ours that the layer is"
        )
    return blocks[np.arange(len(wide)), owner]


def _owner(tensor: Tensor) -> np.ndarray:
    """Return which of the matrices each output is of."""
    parts: np.ndarray = np.zeros(tensor.shape, np.int8)
    for part, piece in enumerate(tensor.pieces):
        piece.view(parts)[...] = part
    return parts[:, 0]


@dataclasses.dataclass(frozen=True)
class NarrowedFactor(ComputedTensor):
    """A wide factor B in a file, read as the factors of the layer's matrices; `tensor`: the tensor as it is read."""

    tensor: Tensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @override
    def rows(self, first: int, last: int) -> np.ndarray:
        return narrow(self.name, self.tensor, self.values.map())[first:last]

    @override
    def stored(self, first: int, last: int) -> tuple[Stored, ...]:
        return (self.values,)


def narrowed(expected: Mapping[str, Tensor], headers: Mapping[str, Stored]) -> dict[str, TensorSource]:
    """Return the tensors of an adapter as its factors are read; wide ones are read once, and checked."""
    found: dict[str, TensorSource] = dict(headers)
    for name, stored in headers.items():
        if ranks(expected, name) > 1:
            factor = NarrowedFactor(name, stored, expected[name])
            factor.map()
            found[name] = factor
    return found


def patterns(counts: Mapping[str, int], rank: int, alpha: float, *, stabilised: bool) -> dict[str, dict[str, Any]]:
    """Return the fields of PEFT's config that say the ranks of such layers, and the alphas that leave their scale.

    Args:
        counts: ranks of all others that each has.
        stabilised: True for rsLoRA, whose scale has the root of the rank.
    """
    alphas = {name: alpha * (math.sqrt(count) if stabilised else count) for name, count in counts.items()}
    return {"rank_pattern": {name: count * rank for name, count in counts.items()}, "alpha_pattern": alphas}
