"""A directory in Hugging Face's form together with an adapter in PEFT's: one model with LoRA layers, to be imported."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from models.huggingface.adapters import TENSORS, adapter_tensors
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing_adapter import read_peft_headers
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.fused_adapters import narrowed
from models.huggingface.rows import ConversionError, Tensor


def with_adapter(source: HuggingFaceDirectory, folder: Path) -> HuggingFaceDirectory:
    """Return the base with the adapter of a directory: its decoder has LoRA layers, its tensors those of both.

    Raises:
        ConversionError: the adapter cannot be read, has what our layers do not compute, or was made for another base.
    """
    headers, config = read_peft_headers(folder.expanduser().absolute())
    shapes = {name: stored.shape for name, stored in headers.items()}
    try:
        decoder, factors = adapter_tensors(shapes, config, source.decoder)
        tensors = narrowed(factors, headers)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from None
    for name, stored in headers.items():
        if stored.dtype not in ("F32", "BF16", "F16"):
            raise ConversionError(f"{folder / TENSORS}: {name}: expected F32, BF16 or F16, got {stored.dtype}")
    wrapped = {name.replace(".inner.", "."): name for name in by_name(abstract_params(decoder))}
    base = {name: _moved(tensor, wrapped) for name, tensor in source.expected.items()}
    return dataclasses.replace(
        source, decoder=decoder, tensors={**source.tensors, **tensors}, expected={**base, **factors}
    )


def _moved(tensor: Tensor, wrapped: Mapping[str, str]) -> Tensor:
    """Return a tensor whose parameters are within wrapped layers: `layers.attention.inner.q_dkqh`."""
    return tensor._replace(pieces=tuple(one._replace(parameter=wrapped[one.parameter]) for one in tensor.pieces))
