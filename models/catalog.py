"""The published models of all families, by name."""

from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean
from models.deepseek import deepseek
from models.family import Family
from models.gemma import gemma
from models.gpt2 import gpt2
from models.gpt_oss import gpt_oss
from models.llama import llama
from models.mistral import mistral
from models.moe import moe
from models.qwen import qwen

FAMILIES: dict[str, Family] = {
    "Llama": llama,
    "Qwen": qwen,
    "Gemma": gemma,
    "Mistral": mistral,
    "mixtures of experts": moe,
    "DeepSeek": deepseek,
    "gpt-oss": gpt_oss,
    "GPT-2": gpt2,
}


def published_model(name: str) -> Decoder.Config:
    """Return the model of that name, e.g. "Qwen3-0.6B"; activations are bfloat16, parameters float32.

    Raises:
        UserError: no family has such a model; the nearest names are given.
    """
    for family in FAMILIES.values():
        if name in family.models:
            return family(name)
    known = [known for family in FAMILIES.values() for known in family.names]
    raise UserError(f"no published model {name!r}{did_you_mean(name, known)}; `axl models list` shows all {len(known)}")
