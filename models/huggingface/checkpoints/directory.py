"""A directory, or one file, in Hugging Face's form: what it holds, checked before a tensor is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from axlearn_like.layers.decoder import Decoder
from axlearn_like.run.object_store import fetched
from axlearn_like.tokenizers.files import TOKENIZERS
from mesh.files.bucket import bucket_url
from models.huggingface.adapters import CONFIG as ADAPTER_CONFIG
from models.huggingface.architecture import Architecture
from models.huggingface.architectures import read_decoder
from models.huggingface.config_json import FILE, ConfigJson
from models.huggingface.convert import abstract_params, by_name, check_tensors, expected_tensors
from models.huggingface.rows import ConversionError, Tensor, count_tensors
from models.huggingface.tensor_files.found import (
    INDEX,
    absent,
    check_alone,
    check_own_files,
    find_files,
    read_headers,
    refused,
)
from models.huggingface.tensor_files.packed import (
    PACKING,
    Mxfp4Matrices,
    TensorSource,
    read_packing,
    unpacked,
    unread_packing,
)
from models.huggingface.tensor_files.safetensors import Stored

ORIGINAL = "huggingface"  # files of an imported model besides its weights
RECORD = "import.json"  # record of an import
_LARGER = 1000  # times what the files hold, whatever form they hold it in
_MANY = 10_000  # tensors; those that are missing are named, unless there are far more
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Besides weights: everything that says how to use the model, and nothing that is run.
_KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*", "USE_POLICY*")
_TOKENIZER = (*TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
_TOKENIZER += ("*.model", "*.tiktoken")


@dataclass(frozen=True)
class HuggingFaceDirectory:
    """A model whose tensors are those of its `config.json`."""

    path: Path  # the directory
    architecture: Architecture  # the one that `config.json` names
    decoder: Decoder.Config  # the one that `config.json` describes
    tensors: Mapping[str, TensorSource]  # name -> where its bytes are; with copies and ignored ones
    expected: Mapping[str, Tensor]  # name -> shape, and the parameters of our decoder that it fills
    notes: tuple[str, ...]  # messages to the user on what was ignored
    left_out: tuple[str, ...] = ()  # patterns of the names of files that an import does not keep

    @classmethod
    def open(cls, path: str | Path) -> "HuggingFaceDirectory":
        """Read `config.json`, the index and the headers; names, shapes and dtypes are checked, no tensor is read.

        Args:
            path: a directory, or a safetensors file beside its `config.json`.

        Raises:
            UserError: names the file, the field or tensor, what was expected and what was found.
        """
        name, path = bucket_url(path) or str(path), fetched(path, "path").absolute()
        if not path.exists():
            raise absent(name, path)
        folder = path if path.is_dir() else path.parent
        if not path.is_dir() and path.suffix != ".safetensors":
            raise refused(path)
        if not path.is_dir():
            check_alone(path)
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / FILE).is_file():
            raise ConversionError(
                f"{folder}: expected a model, got an adapter of PEFT; with its base it becomes one: "
                f"axl convert import BASE TARGET --adapter {folder}"
            )
        check_own_files(folder)
        json = ConfigJson.load(folder / FILE)
        architecture, decoder = read_decoder(json)
        files = find_files(folder) if path.is_dir() else {path: None}
        stored = {architecture.full_name(name): stored for name, stored in read_headers(files).items()}
        _check_size(folder / FILE, decoder, architecture, stored)
        packing = read_packing(json)
        tensors: Mapping[str, TensorSource] = stored if packing is None else unpacked(stored, packing)
        held = {name for name, tensor in tensors.items() if isinstance(tensor, Mxfp4Matrices)}
        expected = expected_tensors(decoder, architecture, packed=held)
        method = unread_packing(json)
        try:
            _check(folder, tensors, expected, architecture)
        except ConversionError as error:
            raise error if method is None else _packed(folder, method, error) from None
        unread = json.unread()
        notes = [f"{json.file}: unknown fields, ignored: {', '.join(unread)}"] if unread else []
        notes += [] if method is None else [f"{json.file}: {PACKING} of {method!r}, ignored: all tensors are floats"]
        return cls(folder, architecture, decoder, tensors, expected, tuple(notes))

    def check_copies(self) -> None:
        """Refuse a copy of a tied tensor that is not equal to it (ConversionError); both are read."""
        for copy, original in self.architecture.copies.items():
            if copy in self.tensors and copy not in self.expected:
                first, second = self.tensors[copy], self.tensors[original]
                count = first.shape[0]
                step = max(1, (16 << 20) * count // max(1, first.nbytes))
                parts = [(row, min(row + step, count)) for row in range(0, count, step)]
                if first.shape != second.shape or not all(
                    np.array_equal(first.rows(*part), second.rows(*part)) for part in parts
                ):
                    raise ConversionError(
                        f"{self.tensors[copy].path}: {copy} differs from {original}, of which it should be a copy: "
                        f'{FILE} ties them; expected "tie_word_embeddings": false there for a head of its own'
                    )

    def dtypes(self) -> dict[str, str]:
        """Return the dtype that holds a parameter's tensors exactly: parameter -> "float32" or "bfloat16"."""
        found: dict[str, set[str]] = {}
        for name, tensor in self.expected.items():
            for piece in tensor.pieces:
                found.setdefault(piece.parameter, set()).add(self.tensors[name].dtype)
        return {parameter: "bfloat16" if kinds == {"BF16"} else "float32" for parameter, kinds in found.items()}

    def kept_files(self) -> list[Path]:
        """Return the files besides the weights that an export gives back, such as the tokenizer's."""
        found = {file for pattern in _KEPT for file in self.path.glob(pattern) if file.is_file()}
        without = (INDEX, "*.safetensors.index.json", *self.left_out)
        return sorted(file for file in found if not any(fnmatchcase(file.name, pattern) for pattern in without))

    def without_tokenizer(self) -> "HuggingFaceDirectory":
        """Return the model without the files of its tokenizer and chat template."""
        return replace(self, left_out=_TOKENIZER)


def is_huggingface(path: str | Path) -> bool:
    """Return True for a directory in Hugging Face's form, or a safetensors file."""
    path = Path(path).expanduser()
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / FILE).is_file() and not (path / "config.txt").is_file()


def _packed(folder: Path, method: str, error: ConversionError) -> ConversionError:
    return ConversionError(
        f"{folder}: the tensors are held as {method!r} does ({FILE}, {PACKING}), which is not read; expected floats, "
        f"fp8 or mxfp4. With transformers: model.dequantize(), then model.save_pretrained(DIR). In detail: {error}"
    )


def _check_size(file: Path, decoder: Decoder.Config, architecture: Architecture, tensors: Mapping[str, Stored]) -> None:
    """Refuse a model that is far larger than the files, before its tensors are listed one by one."""
    shapes = {name: leaf.shape for name, leaf in by_name(abstract_params(decoder)).items()}
    count = count_tensors(shapes, architecture.sections(decoder))
    if count > _MANY + 10 * len(tensors):
        raise ConversionError(f"{file}: describes a model of {count:,} tensors, but the files hold {len(tensors):,}")
    wanted = sum(map(math.prod, shapes.values()))
    held = sum(math.prod(stored.shape) for stored in tensors.values())
    if wanted > _LARGER * max(held, 1):
        raise ConversionError(f"{file}: describes a model of {wanted:,} numbers, but the files hold {held:,}")


def _check(
    folder: Path, tensors: Mapping[str, TensorSource], expected: Mapping[str, Tensor], architecture: Architecture
) -> None:
    """Refuse tensors that are not those of the decoder, and dtypes other than floats of 16 or 32 bits."""
    shapes = {name: stored.shape for name, stored in tensors.items()}
    for name, tensor in expected.items():
        if name in shapes and name in architecture.vocabulary and shapes[name] != tensor.shape:
            found, wanted = shapes[name][:1], tensor.shape[:1]
            if shapes[name][1:] == tensor.shape[1:]:
                raise ConversionError(
                    f"{tensors[name].path}: {name}: expected {wanted[0]} rows, vocab_size of {FILE}, got {found[0]}"
                )
    check_tensors(shapes, expected, architecture, where=f"{folder}: the tensors")
    for name in expected:
        if tensors[name].dtype not in FLOATS:
            found = tensors[name]
            raise ConversionError(f"{found.path}: {name}: expected dtype {' or '.join(FLOATS)}, got {found.dtype}")
