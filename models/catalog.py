"""The published models of all families, by name."""

from collections.abc import Callable
from typing import NamedTuple

from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean
from models.llama import LLAMA, LLAMA2, llama
from models.moe import MOE, moe
from models.qwen import QWEN, qwen


class Family(NamedTuple):
    """Models that one function makes, by their names."""

    names: tuple[str, ...]
    make: Callable[[str], Decoder.Config]


FAMILIES = {
    "Llama": Family((*LLAMA2, *LLAMA), llama),
    "Qwen": Family(tuple(QWEN), qwen),
    "mixtures of experts": Family(tuple(MOE), moe),
}


def published_model(name: str) -> Decoder.Config:
    """Return the model of that name, e.g. "Qwen3-0.6B"; activations are bfloat16, parameters float32.

    Raises:
        UserError: no family has such a model; the nearest names are given.
    """
    for family in FAMILIES.values():
        if name in family.names:
            return family.make(name)
    known = [known for family in FAMILIES.values() for known in family.names]
    raise UserError(f"no published model {name!r}{did_you_mean(name, known)}; `axl models list` shows all {len(known)}")
