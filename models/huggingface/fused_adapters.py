"""Factors of matrices that are one linear layer in PEFT: k_up and v_up of latent attention are `kv_b_proj` there.

A layer there has one factor A; here each matrix has its own. Where they are equal, they are the layer's. Where they
differ, as they do after training, the layer gets a rank for each: A has the rows of all, B a block for each and zeros.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.huggingface.rows import Piece, Tensor

A, B = ".lora_A.weight", ".lora_B.weight"


def filled(tensor: Tensor, piece: Piece, arrays: Mapping[str, Any]) -> np.ndarray:
    """Return the tensor with one of its pieces, float32, and zeros elsewhere."""
    out: np.ndarray = np.zeros(tensor.shape, np.float32)
    piece.view(out)[...] = np.asarray(arrays[piece.parameter][piece.index], np.float32)
    return out


def widen(tensors: dict[str, np.ndarray], expected: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> dict[str, int]:
    """Give the layers whose matrices have different factors A a rank for each; return how many by module.

    Args:
        tensors: of the adapter, which are replaced.
        expected: the same, with the pieces that fill them.
        arrays: factors here, by path.
    """
    found = {
        name: [filled(tensor, piece, arrays) for piece in tensor.pieces]
        for name, tensor in expected.items()
        if name.endswith(A) and len(tensor.pieces) > 1
    }
    differing = {
        _module(name): len(parts)
        for name, parts in found.items()
        if not all(np.array_equal(parts[0], other) for other in parts[1:])
    }
    for name, parts in found.items():
        if _module(name) in differing:
            second = name.removesuffix(A) + B
            blocks = [filled(expected[second], piece, arrays) for piece in expected[second].pieces]
            tensors[name], tensors[second] = np.concatenate(parts), np.concatenate(blocks, axis=1)
    return differing


def patterns(counts: Mapping[str, int], rank: int, alpha: float, *, stabilised: bool) -> dict[str, dict[str, Any]]:
    """Return the fields of PEFT's config that say the ranks of such layers, and the alphas that leave their scale.

    Args:
        counts: ranks of all others that each has.
        rank: of all others.
        alpha: of all others.
        stabilised: for rsLoRA, whose scale has the root of the rank.
    """
    alphas = {name: alpha * (math.sqrt(count) if stabilised else count) for name, count in counts.items()}
    return {"rank_pattern": {name: count * rank for name, count in counts.items()}, "alpha_pattern": alphas}


def _module(name: str) -> str:
    return name.removesuffix(A).rpartition(".")[2]
