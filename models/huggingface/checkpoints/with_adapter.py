"""A directory in Hugging Face's form together with an adapter in PEFT's: one model with LoRA layers, to be imported."""

import dataclasses
from pathlib import Path

from axlearn_like.config import walk_configs
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.wrappers.lora import LoRA
from models.huggingface.adapters import TENSORS, adapter_tensors
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing_adapter import read_peft_headers
from models.huggingface.rows import ConversionError, Tensor


def with_adapter(source: HuggingFaceDirectory, folder: Path) -> HuggingFaceDirectory:
    """Return the base with the adapter of a directory: its decoder has LoRA layers, its tensors those of both.

    Raises:
        ConversionError: the adapter cannot be read, has what is not computed here, or was made for another base.
    """
    headers, config = read_peft_headers(folder.expanduser().absolute())
    shapes = {name: stored.shape for name, stored in headers.items()}
    try:
        decoder, factors = adapter_tensors(shapes, config, source.decoder)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from None
    for name, stored in headers.items():
        if stored.dtype not in ("F32", "BF16", "F16"):
            raise ConversionError(f"{folder / TENSORS}: {name}: expected F32, BF16 or F16, got {stored.dtype}")
    inner = _wrapped(decoder)
    base = {name: _moved(tensor, inner) for name, tensor in source.expected.items()}
    return dataclasses.replace(
        source, decoder=decoder, tensors={**source.tensors, **headers}, expected={**base, **factors}
    )


def _wrapped(decoder: Decoder.Config) -> tuple[str, ...]:
    """Return the layers of a block that have factors."""
    return tuple(path.split(".")[1] for path, node in walk_configs(decoder) if isinstance(node, LoRA.Config))


def _moved(tensor: Tensor, layers: tuple[str, ...]) -> Tensor:
    """Return a tensor whose parameters are within wrapped layers: `layers.attention.inner.q_dkqh`."""
    pieces = []
    for piece in tensor.pieces:
        stack, _, rest = piece.parameter.partition(".")
        child, _, name = rest.partition(".")
        path = f"{stack}.{child}.inner.{name}" if stack == "layers" and child in layers else piece.parameter
        pieces.append(piece._replace(parameter=path))
    return tensor._replace(pieces=tuple(pieces))
