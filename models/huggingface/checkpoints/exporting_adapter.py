"""Export of the low-rank factors of a checkpoint as a directory in PEFT's form; the base is not read."""

from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.decoder import Decoder
from models.huggingface.adapters import CONFIG, TENSORS, to_peft
from models.huggingface.checkpoints.exporting import Entries, write_json
from models.huggingface.checkpoints.work_directory import check_free, export_directory
from models.huggingface.tensor_files.safetensors import SafetensorsWriter


def export_adapter(params: Entries, cfg: Decoder.Config, target: Path, base: str = "") -> int:
    """Write the adapter of a checkpoint to `target`, which appears complete or not at all; return its bytes.

    Args:
        params: the checkpoint of a model with LoRA layers.
        cfg: the model.
        target: a directory that does not exist yet, or is empty.
        base: name or path of the base model, recorded in the config.

    Raises:
        ConversionError: there is no adapter, PEFT has no counterpart of it, or it cannot be written.
    """
    check_free(target, "an export")
    adapter = to_peft(saved_factors(params), cfg, base)
    nbytes = sum(tensor.nbytes for tensor in adapter.tensors.values())
    described = {name: ("F32", tensor.shape) for name, tensor in adapter.tensors.items()}
    with export_directory(target, nbytes) as work:
        with SafetensorsWriter(work / TENSORS, described) as writer:
            for name in described:
                writer.write(name, adapter.tensors[name])
        write_json(work / CONFIG, adapter.config)
    return nbytes


def saved_factors(params: Entries) -> Params:
    """Return the factors of a checkpoint alone, as nested dict."""
    found: dict[str, Any] = {}
    for name, entry in params.manifest.items():
        *folders, last = name.split("/")
        if "lora" not in folders:
            continue
        layers, *shape = entry["shape"]
        order = tuple(range(len(shape)))
        folder = found
        for key in folders:
            folder = folder.setdefault(key, {})
        folder[last] = np.stack([params.entry(name, (layer,), order) for layer in range(layers)])
    return found
