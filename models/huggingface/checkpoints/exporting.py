"""Export: parameters of a checkpoint as a directory in Hugging Face's form, tensor by tensor."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.manifest import Manifest, check_structure
from axlearn_like.layers.decoder import Decoder
from axlearn_like.tokenizers.files import TEMPLATE, copy_tokenizer, is_tokenizer
from mesh.files.bounded import parse_json, read_bounded, read_json
from models.huggingface.architecture import Architecture
from models.huggingface.architectures import architecture_for, config_json, read_decoder, same_function
from models.huggingface.checkpoints.directory import FLOATS, ORIGINAL, RECORD
from models.huggingface.checkpoints.plan import manifest_name
from models.huggingface.checkpoints.work_directory import check_free, export_directory
from models.huggingface.config_json import FILE, ConfigJson
from models.huggingface.convert import abstract_params, expected_tensors, unrounded_parameters
from models.huggingface.rows import ConversionError, Tensor
from models.huggingface.tensor_files.found import INDEX, SINGLE, check_own_files
from models.huggingface.tensor_files.packed import PACKING
from models.huggingface.tensor_files.safetensors import DTYPES, shards

GENERATION = "generation_config.json"
_WHAT = "axl convert export"
_CODES = {name: code for code, name in FLOATS.items()}


class Original(NamedTuple):
    """The parts of a model besides its parameters that an import kept."""

    files: Path | None = None  # directory of its files besides weights, if there is one
    # Tensor -> its dtype in the original; the entry "" is that of all others. Empty: not known.
    dtypes: Mapping[str, str] = {}
    imported: Path | None = None  # the import, whose parameters are the original's tensors; None: there is none
    card: str | None = None  # text of README.md in place of the original's

    @classmethod
    def of(cls, directory: Path | None) -> "Original":
        """Return that of a directory that was imported, or of one in Hugging Face's form."""
        if directory is None:
            return cls()
        if (directory / RECORD).is_file():
            record = read_json(directory / RECORD)
            kinds = {"": record["tensor_dtype"], **record["other_dtypes"]}
            return cls(directory / ORIGINAL, kinds, directory.absolute())
        return cls(directory if (directory / FILE).is_file() else None)


class ExportedTokenizer(NamedTuple):
    """The tokenizer of an exported model."""

    path: str | None = None  # path of its files, written where the original has none; None: there are none
    # Fields of `config.json` that it gives, where there is no original. Its `eos_token_id` are in
    # `generation_config.json` in any case: a model may have learned to end by another than the original's.
    ids: Mapping[str, Any] = {}
    # The chat template that the model was trained with, if that is not the one of the files
    template: str | None = None


class Exported(NamedTuple):
    """The result of an export; `before`: it was there already, and was compared."""

    directory: Path
    architecture: str
    tensors: int
    nbytes: int
    files: int
    before: bool


class Entries(Protocol):
    """Parameters, entry by entry: those of a checkpoint (`SavedParams`), or merged ones (`MergedParams`)."""

    @property
    def path(self) -> Path:
        """The directory of the checkpoint."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Shapes and types by name."""
        ...

    def entry(self, name: str, index: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
        """Return one entry of a stack, its axes in this order, contiguous."""
        ...


def whole_stack(params: Entries, name: str) -> np.ndarray:
    """Return all entries of a stack over layers, which are small, such as factors."""
    layers, *shape = params.manifest[name]["shape"]
    order = tuple(range(len(shape)))
    return np.stack([params.entry(name, (layer,), order) for layer in range(layers)])


def export_checkpoint(
    params: Entries,
    decoder: Decoder.Config,
    target: Path,
    *,
    original: Original | None = None,
    dtype: str | None = None,
    max_shard_size: int = 5 * 10**9,
    tokenizer: ExportedTokenizer | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write safetensors (several files with an index if one would be too large), `config.json` and other files.

    Args:
        params: the checkpoint's parameters.
        target: a directory that does not exist, is empty, or is of the same export, with which it is compared.
        original: the model that they come from, whose files are copied; None: there is none.
        dtype: the dtype of all tensors; None: that of the original, else that of the checkpoint. Parameters that
            layers compute with unrounded (`Layer.unrounded`) keep the checkpoint's, unless it is float32.
        max_shard_size: bytes of a file with tensors.
        tokenizer: the model's tokenizer; None: the original's, if there is one.
        progress: callback with the bytes written and all bytes.

    Raises:
        UserError: no architecture has such decoders, the target exists, a full disk, a damaged checkpoint. Nothing
            stays behind.
    """
    target = target.expanduser().absolute()
    original, tokenizer = original or Original(), tokenizer or ExportedTokenizer()
    check_free(target, _WHAT, content=FILE)  # checkpoint is not read yet
    architecture, config = _config(decoder, original, dtype, params, dict(tokenizer.ids))
    expected = expected_tensors(decoder, architecture)
    _check_params(params, decoder)
    kinds = _dtypes(expected, decoder, params, original, dtype)
    described = {name: (kinds[name], tensor.shape) for name, tensor in expected.items()}
    sizes = {name: math.prod(shape) * np.dtype(DTYPES[kind]).itemsize for name, (kind, shape) in described.items()}
    groups = list(shards(sizes, max_shard_size))
    total, done = sum(sizes.values()), 0
    with export_directory(target, total, _WHAT, content=FILE) as made:
        work = made.path
        for number, names in enumerate(groups, 1):
            with made.tensors(_shard(number, len(groups)), {n: described[n] for n in names}) as file:
                for name in names:
                    file.write(name, _tensor(expected[name], params, described[name]))
                    done += sizes[name]
                    progress(done, total)
        if len(groups) > 1:
            files = {name: _shard(number, len(groups)) for number, names in enumerate(groups, 1) for name in names}
            write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})
        _write_others(work, original, config)
        _write_ends(work, tokenizer.ids.get("eos_token_id"))
        if tokenizer.path is not None and not is_tokenizer(work):
            copy_tokenizer(tokenizer.path, work)
        if tokenizer.template is not None:
            (work / TEMPLATE).write_text(
                tokenizer.template, encoding="utf-8"
            )  # goes before the field of tokenizer_config.json
        if original.card is not None:
            (work / "README.md").write_text(original.card, encoding="utf-8")
    return Exported(target, architecture.name, len(expected), total, len(groups), made.before)


def _config(
    decoder: Decoder.Config, original: Original, dtype: str | None, params: Entries, token_ids: dict[str, Any]
) -> tuple[Architecture, dict[str, Any] | bytes]:
    """Return the architecture and `config.json`: the original's bytes if they say what is written."""
    if original.files is not None:
        content = read_bounded(original.files / FILE)
        fields = parse_json(content)
        packed = fields.pop(PACKING, None) is not None  # written tensors are not packed
        architecture, described = read_decoder(ConfigJson(fields, str(original.files / FILE)))
        if same_function(described, decoder):
            as_there = dtype is None or dtype == fields.get("dtype", fields.get("torch_dtype"))
            left_out = {name: 0 for name in architecture.predictors if fields.get(name)}
            if as_there and not packed and not left_out:
                return architecture, content
            changed = {} if as_there else {key: dtype for key in ("dtype", "torch_dtype") if key in fields}
            return architecture, {**fields, **changed, **left_out}
        token_ids = {key: value for key, value in fields.items() if key.endswith("_token_id")} | token_ids
    saved = {entry["dtype"] for entry in params.manifest.values()}
    kind = dtype or FLOATS.get(original.dtypes.get("", ""), "bfloat16" if saved == {"bfloat16"} else "float32")
    architecture = architecture_for(decoder)
    return architecture, config_json(decoder, kind, architecture, **token_ids)


def _check_params(params: Entries, decoder: Decoder.Config) -> None:
    """Refuse a checkpoint of another model; dtypes may differ."""
    kinds = {"bfloat16": "float32"}
    as_wanted = {
        name: {**entry, "dtype": kinds.get(entry["dtype"], entry["dtype"])} for name, entry in params.manifest.items()
    }
    check_structure(f"checkpoint {params.path}", abstract_params(decoder), as_wanted)


def _dtypes(
    expected: Mapping[str, Tensor], decoder: Decoder.Config, params: Entries, original: Original, dtype: str | None
) -> dict[str, str]:
    """Return the dtype of each tensor, as safetensors names it."""
    unrounded = unrounded_parameters(decoder)
    untrained = dtype is None and original.imported is not None and params.path.is_relative_to(original.imported)

    def kind(name: str, tensor: Tensor) -> str:
        parameters = {piece.parameter for piece in tensor.pieces}
        saved = _CODES[max(params.manifest[manifest_name(one)]["dtype"] for one in parameters)]
        wanted = original.dtypes.get(name) or original.dtypes.get("") or saved if dtype is None else _CODES[dtype]
        may_be_rounded = untrained or not parameters & unrounded
        return wanted if may_be_rounded or wanted == "F32" else saved

    return {name: kind(name, tensor) for name, tensor in expected.items()}


def _tensor(tensor: Tensor, params: Entries, described: tuple[str, tuple[int, ...]]) -> np.ndarray:
    code, shape = described
    array: np.ndarray = np.empty(shape, jnp.dtype(DTYPES[code]))
    for piece in tensor.pieces:
        entry = params.entry(manifest_name(piece.parameter), piece.index, piece.stored_axes)
        if code == "F16" and not np.all(np.abs(entry.astype(np.float32)) <= np.finfo(np.float16).max):
            raise ConversionError(f"{piece.parameter}: too large a number for float16; export with --dtype bfloat16")
        piece.stored(array)[...] = entry
    return array


def _shard(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_others(work: Path, original: Original, config: dict[str, Any] | bytes) -> None:
    if original.files is not None:
        check_own_files(original.files)
    for file in sorted(original.files.iterdir()) if original.files is not None else ():
        kept = file.is_file() and not file.match("*.safetensors*") and file.name != FILE
        if kept and not any(file.match(pattern) for pattern in ("*.bin", "*.pt", "*.pth", "*.py")):
            shutil.copyfile(file, work / file.name)
    if isinstance(config, bytes):
        (work / FILE).write_bytes(config)
    else:
        write_json(work / FILE, config)
    if not (work / GENERATION).exists():
        fields = read_json(work / FILE)
        ids = {
            key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if fields.get(key) is not None
        }
        write_json(work / GENERATION, {"_from_model_config": True, **ids})


def _write_ends(work: Path, ends: Any) -> None:
    """Add ids to those at which transformers and vLLM end a completion."""
    fields = read_json(work / GENERATION)
    listed, wanted = (
        [] if ids is None else ids if isinstance(ids, list) else [ids] for ids in (fields.get("eos_token_id"), ends)
    )
    if missing := [i for i in wanted if i not in listed]:
        both = [*listed, *missing]
        write_json(work / GENERATION, {**fields, "eos_token_id": both if len(both) > 1 else both[0]})


def write_json(path: Path, value: Any) -> None:
    """Write a value as the files of Hugging Face are written."""
    path.write_text(json.dumps(value, indent=2) + "\n")
