"""Low-rank adapters in files: a directory in PEFT's form, or a run with LoRA layers of this project."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.config import ConfigBase, config_items
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.wrappers import adapters
from axlearn_like.layers.wrappers.base import plain_config
from mesh.files.bounded import read_json
from models.huggingface.adapters import CONFIG, TENSORS, PeftAdapter, adapter_tensors, from_peft
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.exporting_adapter import saved_factors
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.fused_adapters import narrowed
from models.huggingface.rows import ConversionError, Tensor
from models.huggingface.tensor_files.found import check_own_files
from models.huggingface.tensor_files.safetensors import Stored, read_header

_PICKLED = "adapter_model.bin"
_NEEDED = {"r": int, "lora_alpha": int | float}
_MOST = 1_000_000
_CONTAINERS = {
    "rank_pattern": (dict, "an object"),
    "alpha_pattern": (dict, "an object"),
    "target_parameters": (list, "a list"),
}


def read_peft(folder: Path) -> PeftAdapter:
    """Return the adapter of a directory in PEFT's form. Raises as `read_peft_headers`."""
    headers, config = read_peft_headers(folder)
    return PeftAdapter({name: stored.map() for name, stored in headers.items()}, config)


def read_peft_headers(folder: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the tensors' places and the config of a directory in PEFT's form.

    Raises:
        ConversionError: a file is missing, damaged, or of another kind; it names the file.
    """
    if folder.is_dir():
        check_own_files(folder)
    try:
        config = read_json(folder / CONFIG)
    except OSError as error:
        raise ConversionError(f"{folder / CONFIG}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise ConversionError(f"{folder / CONFIG}: is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConversionError(f"{folder / CONFIG}: expected a JSON object")
    for name, kind in _NEEDED.items():
        value: Any = config.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value <= _MOST:
            raise ConversionError(f"{folder / CONFIG}: {name} is {value!r:.60}; expected a number above 0, to {_MOST}")
    for name, (kind, said) in _CONTAINERS.items():
        if not isinstance(config.get(name), kind | None):
            raise ConversionError(f"{folder / CONFIG}: {name} is {config[name]!r:.60}; expected {said}")
    if not (folder / TENSORS).is_file():
        pickled = f"; {_PICKLED} runs code when it is read: save the adapter with safe_serialization=True"
        raise ConversionError(f"{folder}: there is no {TENSORS}{pickled if (folder / _PICKLED).is_file() else ''}")
    return read_header(folder / TENSORS), config


def peft_adapter(folder: Path, model: ConfigBase[Any]) -> adapters.Adapter:
    """Return the adapter of a directory in PEFT's form for this base.

    Raises:
        ConversionError: it cannot be read, has what our layers do not compute, or was made for another base.
    """
    plain = plain_config(model)
    if not isinstance(plain, Decoder.Config):
        raise ConversionError(f"adapters are of decoders; this model is {type(plain).__qualname__}")
    fields = {name: value for name, value in config_items(plain) if name in Decoder.Config.__dataclass_fields__}
    try:
        cfg, factors = from_peft(read_peft(folder), Decoder.Config(**fields))
    except ConversionError as error:
        said = str(error)
        raise ConversionError(said if str(folder) in said else f"{folder}: {said}") from None
    return adapters.adapter_of(cfg, factors)


def run_adapter(params: SavedParams, model: ConfigBase[Any]) -> adapters.Adapter:
    """Return the adapter of a checkpoint whose model has LoRA layers; the base is not read.

    Raises:
        UserError: it has none, or other wrappers too.
    """
    return adapters.adapter_of(model, saved_factors(params))


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
