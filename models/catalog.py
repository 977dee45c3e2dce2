"""The published models of all families, by name."""

from collections.abc import Callable
from typing import NamedTuple

from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean
from models.deepseek import DEEPSEEK, deepseek
from models.gemma import GEMMA, gemma
from models.gpt2 import GPT2, gpt2
from models.gpt_oss import GPT_OSS, gpt_oss
from models.llama import LLAMA, LLAMA2, llama
from models.mistral import MISTRAL, mistral
from models.moe import MOE, moe
from models.qwen import QWEN, qwen


class Family(NamedTuple):
    """Models that one function makes, by their names."""

    names: tuple[str, ...]
    make: Callable[[str], Decoder.Config]


FAMILIES = {
    "Llama": Family((*LLAMA2, *LLAMA), llama),
    "Qwen": Family(tuple(QWEN), qwen),
    "Gemma": Family(GEMMA, gemma),
    "Mistral": Family(tuple(MISTRAL), mistral),
    "mixtures of experts": Family(tuple(MOE), moe),
    "DeepSeek": Family(DEEPSEEK, deepseek),
    "gpt-oss": Family(tuple(GPT_OSS), gpt_oss),
    "GPT-2": Family(tuple(GPT2), gpt2),
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
