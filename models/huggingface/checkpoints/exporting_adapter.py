"""Export of the low-rank factors of a checkpoint as a directory in PEFT's form; the base is not read."""

from pathlib import Path

from axlearn_like.layers.base import Params
from axlearn_like.layers.decoder import Decoder
from models.huggingface.adapter_rows import put
from models.huggingface.adapters import CONFIG, TENSORS, to_peft
from models.huggingface.checkpoints.exporting import Entries, whole_stack, write_json
from models.huggingface.checkpoints.work_directory import export_directory


def export_adapter(params: Entries, cfg: Decoder.Config, target: Path, base: str = "") -> tuple[int, bool]:
    """Write the adapter of a checkpoint to `target`, which appears complete or not at all.

    Args:
        target: a directory that does not exist yet, is empty, or is of the same export.
        base: name or path of the base model, recorded in the config.

    Returns:
        Its bytes, and True if it was there already.

    Raises:
        ConversionError: there is no adapter, PEFT has no counterpart of it, or it cannot be written.
    """
    adapter = to_peft(saved_factors(params), cfg, base)
    nbytes = sum(tensor.nbytes for tensor in adapter.tensors.values())
    described = {name: ("F32", tensor.shape) for name, tensor in adapter.tensors.items()}
    with export_directory(target, nbytes, "an export", content=CONFIG) as made:
        with made.tensors(TENSORS, described) as writer:
            for name in described:
                writer.write(name, adapter.tensors[name])
        write_json(made.path / CONFIG, adapter.config)
    return nbytes, made.before


def saved_factors(params: Entries) -> Params:
    """Return the factors of a checkpoint alone, as nested dict."""
    found: Params = {}
    for name in params.manifest:
        if "/lora/" in f"/{name}":
            put(found, name.replace("/", "."), whole_stack(params, name))
    return found
