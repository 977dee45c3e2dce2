"""The files of a directory that hold its tensors, and the messages where there are none."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.errors import UserError
from mesh.files.bounded import LARGE, BoundsError, check_links, read_json
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files.safetensors import Stored, read_header, unique

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.npz")
_LONGEST_NAME = 255  # bytes; the limit of file systems


def find_files(folder: Path) -> dict[Path, dict[str, str] | None]:
    """Return the files with tensors; with an index, the tensors that it says are in each."""
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        names = ", ".join(file.name for file in found[:4])
        raise ConversionError(f"{folder}: expected {INDEX} beside several files ({names}), got none; name one of them")
    raise refused(folder)


def check_own_files(folder: Path) -> None:
    """Refuse a model's folder with links to files outside of it (ConversionError); see `check_links`."""
    try:
        check_links(folder)
    except BoundsError as error:
        raise ConversionError(str(error)) from None
    except OSError as error:
        raise ConversionError(f"{folder}: cannot be listed ({error.strerror or error})") from None


def refused(path: Path) -> UserError:
    """Return the error of a path without safetensors."""
    pickled = [path] if path.is_file() else sorted(file for p in _PICKLED for file in path.glob(p))
    if pickled and any(pickled[0].match(pattern) for pattern in _PICKLED):
        return ConversionError(
            f"{pickled[0]}: expected safetensors, got a pickled file, which runs code when it is read. Where you trust "
            "it, convert it: python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR')"
            ".save_pretrained('OUT')\""
        )
    if path.is_file():
        return ConversionError(f"{path}: expected a directory or a safetensors file; name the directory {path.parent}")
    others = sorted(file.name for pattern in _OTHERS for file in path.glob(pattern))
    found = f"{others[0]}, which is in another form" if others else "neither"
    return ConversionError(f"{path}: expected {SINGLE} or {INDEX}, got {found}")


def absent(name: str, path: Path) -> UserError:
    """Return the error of a path that does not exist; `name`: the path as the user wrote it."""
    hint = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.exists():
        hint = f"; if it is a model of the Hugging Face Hub, download it first: hf download {name} --local-dir DIR"
    return ConversionError(f"{path}: there is no such file or directory{hint}")


def check_alone(path: Path) -> None:
    """Refuse one of the several files of a model (ConversionError)."""
    number = re.search(r"-\d+-of-(\d+)$", path.stem)
    if number and int(number[1]) > 1:
        raise ConversionError(f"{path}: one of {int(number[1])} files of a model; name the directory {path.parent}")


def _indexed(index: Path) -> dict[Path, dict[str, str] | None]:
    try:
        weight_map = read_json(index, LARGE, pairs=unique)["weight_map"]
        by_file: dict[str, dict[str, str]] = {}
        for tensor, file in weight_map.items():
            by_file.setdefault(file, {})[tensor] = file
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index}: expected JSON with `weight_map`, tensor to file ({error})"[:400]) from None
    for file, tensors in by_file.items():
        if not _is_name(file):
            raise ConversionError(
                f"{index}: {min(tensors)}: expected the name of a file beside the index, got {file!r}"
            )
        if not (index.parent / file).is_file():
            raise ConversionError(
                f"{index.parent / file}: there is no such file; the index has {len(tensors)} tensors in it, such as "
                f"{min(tensors)}"
            )
    return {index.parent / file: tensors for file, tensors in sorted(by_file.items())}


def _is_name(file: Any) -> bool:
    """Return True for the name of a file, which leads to no other folder."""
    if not isinstance(file, str) or not file.isprintable() or len(os.fsencode(file)) > _LONGEST_NAME:
        return False
    return Path(file).name == file and file not in ("", ".", "..") and "\\" not in file


def read_headers(files: Mapping[Path, dict[str, str] | None]) -> dict[str, Stored]:
    """Return the tensors of all files, each in exactly the file that the index says."""
    tensors: dict[str, Stored] = {}
    for path in files:
        for name, stored in read_header(path).items():
            if name in tensors:
                raise ConversionError(f"{path}: {name} is in {tensors[name].path.name} already")
            tensors[name] = stored
    for path, indexed in files.items():
        for name in indexed or ():
            if name not in tensors or tensors[name].path != path:
                where = tensors[name].path.name if name in tensors else "no file"
                raise ConversionError(f"{path}: {name}: expected here by {INDEX}, got it in {where}")
    indexed_names = {name for names in files.values() for name in names or ()}
    extra = [name for name in tensors if name not in indexed_names]
    if extra and indexed_names:
        raise ConversionError(f"{tensors[extra[0]].path}: {extra[0]}: not in {INDEX}, which has every other tensor")
    return tensors
