"""The files of a tokenizer in Hugging Face's form: found, read and checked. Nothing is downloaded."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from axlearn_like.run.object_store import fetched
from axlearn_like.tokenizers.protocol import TokenizerError
from mesh.errors import did_you_mean, nearest, taken_from
from mesh.files.bounded import LARGE, BoundsError, check_links, parse_json, read_bounded
from mesh.files.bucket import bucket_url

Json = dict[str, Any]

# A vocabulary and its merges, in the two spellings that GPT-2 was published in.
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
TOKENIZERS = ("tokenizer.json", *(name for pair in _PAIRS for name in pair))
_NEEDED = (".", ".json", ".txt", ".jinja", ".bpe", ".gz", ".model")  # names of a tokenizer's files end so
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
TEMPLATE = "chat_template.jinja"
_UNPACKED = 32 << 20  # bytes of a compressed file; those of GPT-2 have half a million
_MOST_TOKENS = 10_000_000  # tokens and merges; the largest tokenizers have a million
# Classes of transformers whose pair of files means what GPT-2's does.
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files; equal if their digests are."""

    where: Path = field(compare=False)  # the file that errors name
    spec: Json = field(compare=False)  # the content of tokenizer.json, or one made of a pair of files
    # Settings of each other file by its name; {} where it is not there
    settings: Mapping[str, Json] = field(compare=False)
    template: str | None = field(compare=False)  # the chat template, if there is one
    ends: Any = field(compare=False)  # `eos_token_id` beside the tokenizer, as `_ends` finds it
    ends_in: Path = field(compare=False)  # the file that it stands in
    digest: str  # digest of the content of all files but that of how to generate

    def token(self, name: str) -> str | None:
        """Return the text of a named special token, such as "eos_token", if the files name it."""
        for file in _SETTINGS[:2]:
            value = self.settings[file].get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str) and value:
                return value
        return None

    @property
    def named(self) -> dict[str, str]:
        """The special tokens that the files name, as a chat template sees them."""
        names = {name for file in _SETTINGS[:2] for name in self.settings[file] if name.endswith("_token")}
        found = {name: self.token(name) for name in sorted(names)}
        return {name: text for name, text in found.items() if text is not None}


def read_files(path: str | Path) -> TokenizerFiles:
    """Read a directory, a tokenizer.json, or one file of a pair beside the other (.gz too).

    `package:folder` is a folder in an installed package, such as `experiments:small_bpe`.

    Raises:
        TokenizerError: there is none, a file is damaged, or of a kind that needs another library.
    """
    place = located(str(path))
    folder = place if place.is_dir() else place.parent
    if place == folder and ":" not in str(path):  # links in a package are its installer's
        try:
            check_links(folder)
        except OSError as error:
            raise TokenizerError(str(error)) from None
    contents: dict[str, bytes] = {}
    if place.is_file() and place.name.removesuffix(".gz") not in {name for pair in _PAIRS for name in pair}:
        where, contents[place.name] = place, _read(place)
        spec = _object(contents[place.name], place)
    else:
        where, spec, contents = _find(place, folder)
    settings = {name: _optional(folder, name, contents) for name in _SETTINGS}
    if "model" not in spec:
        raise TokenizerError(
            f"{where}: expected a tokenizer.json, an object with a field 'model'; got {list(spec)[:5]}"
        )
    if spec.get("added_tokens") is None:
        spec["added_tokens"] = []
    if where.name != "tokenizer.json":
        _check_class(where, settings["tokenizer_config.json"])
    digest = xxhash.xxh3_128()
    for name in sorted(contents.keys() - {_SETTINGS[2]}):  # sampling settings do not change ids
        digest.update(f"{name}\n{len(contents[name])}\n".encode() + contents[name])
    template = _template(folder, settings, digest)
    ends, ends_in = _ends(folder)
    return TokenizerFiles(where, spec, settings, template, ends, ends_in, digest.hexdigest())


def _ends(folder: Path) -> tuple[Any, Path]:
    """Return the ids that end a completion besides the tokenizer's `eos_token`, as files say them, and the file.

    They stand where vLLM takes them: in generation_config.json; in config.json only where that file is not there, and
    in its `text_config` where they are not at its top (transformers' `GenerationConfig.from_model_config`).
    """
    generation, model = folder / _SETTINGS[2], folder / "config.json"
    if generation.is_file() or not model.is_file():
        return _optional(folder, generation.name, {}).get("eos_token_id"), generation
    fields = _object(_read(model), model)
    inner = fields.get("text_config")
    top = fields.get("eos_token_id")
    return inner.get("eos_token_id") if top is None and isinstance(inner, dict) else top, model


def located(path: str) -> Path:
    """Return the path, of which `package:path` is one in an installed package."""
    if bucket_url(path):
        return fetched(path, "path", only=lambda name: name.endswith(_NEEDED))
    package, colon, inside = path.partition(":")
    if colon and package.isidentifier() and (found := find_spec(package)) and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0]) / inside
    return fetched(path, "path")


def _find(place: Path, folder: Path) -> tuple[Path, Json, dict[str, bytes]]:
    """Return the file to name in errors, the tokenizer's specification, and the bytes that it was read from."""
    if not place.exists():
        near = did_you_mean(place.name, nearest(place.name, [each.name for each in place.parent.glob("*")]))
        hint = near or taken_from(place)
        raise TokenizerError(f"{place} does not exist: expected a directory or a tokenizer.json here{hint}")
    if place.is_dir() and (found := _existing(folder, "tokenizer.json")) is not None:
        data = _read(found)
        return found.with_name("tokenizer.json"), _object(data, found), {"tokenizer.json": data}
    for names in _PAIRS:
        vocab, merges = (_existing(folder, name) for name in names)
        if vocab is None and merges is None or place.is_file() and place not in (vocab, merges):
            continue
        if vocab is None or merges is None:
            raise TokenizerError(f"{folder} has only one of {names[0]} and {names[1]}; a byte-pair encoding needs both")
        data = {names[0]: _read(vocab), names[1]: _read(merges)}
        return vocab, _gpt2(_object(data[names[0]], vocab), data[names[1]], merges), data
    pairs = " or ".join(" + ".join(names) for names in _PAIRS)
    hint = ""
    if any(folder.glob("*.model")):
        hint = "; a SentencePiece .model is rewritten by transformers' AutoTokenizer.from_pretrained, save_pretrained"
    raise TokenizerError(f"{folder} has no tokenizer: expected tokenizer.json, or {pairs} (.gz too){hint}")


def _gpt2(vocab: Json, merges: bytes, where: Path) -> Json:
    """Return the specification of a byte-level encoding from its vocabulary and its merges."""
    lines = _text(merges, where).split("\n")
    lines = lines[1:] if lines and lines[0].startswith("#version") else lines
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip()]
    for pair in pairs:
        if len(pair) != 2 or "".join(pair) not in vocab:
            raise TokenizerError(f"{where}: the merge {' '.join(pair)[:60]!r} makes no token of the vocabulary")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": pairs, "ignore_merges": False, "byte_fallback": False}
    added = [
        {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), **token}
        for token in [{"id": vocab.get("<|endoftext|>"), "content": "<|endoftext|>", "special": True}]
        if token["id"] is not None
    ]
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    return {**dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")), **spec}


def _check_class(where: Path, config: Json) -> None:
    """Refuse a pair of files that another class splits in another way before it merges."""
    kind = config.get("tokenizer_class")
    if where.name.removesuffix(".gz") in {pair[0] for pair in _PAIRS} and kind not in (None, *_GPT2):
        raise TokenizerError(
            f"{where}: tokenizer_class is {kind!r}, which splits text in a way that these files do not say; its "
            "tokenizer.json is needed (transformers' save_pretrained writes it)"
        )


def _template(folder: Path, settings: Mapping[str, Json], digest: Any) -> str | None:
    path = folder / TEMPLATE
    if path.is_file():
        data = _read(path)
        digest.update(data)
        return _text(data, path)
    value = settings["tokenizer_config.json"].get("chat_template")
    if isinstance(value, list):  # several, by name
        named = (each for each in value if isinstance(each, dict) and each.get("name") == "default")
        value = next((each.get("template") for each in named), None)
    return value if isinstance(value, str) else None


def _existing(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _optional(folder: Path, name: str, contents: dict[str, bytes]) -> Json:
    path = folder / name
    if not path.is_file():
        return {}
    contents[name] = _read(path)
    return _object(contents[name], path)


def _read(path: Path) -> bytes:
    try:
        data = read_bounded(path, LARGE)
        if path.suffix != ".gz":
            return data
        content = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_UNPACKED + 1)
        if len(content) > _UNPACKED:
            raise BoundsError(f"expected at most {_UNPACKED:,} bytes when unpacked, got more")
        return content
    except (OSError, EOFError, zlib.error) as error:
        raise TokenizerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 at byte {error.start}") from None


def _object(data: bytes, path: Path) -> Json:
    try:
        found = parse_json(data, containers=_MOST_TOKENS)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def is_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return True if a directory has the files of a tokenizer."""
    folder = Path(path)
    return any(_existing(folder, name) for name in ("tokenizer.json", *(pair[0] for pair in _PAIRS)))


def copy_tokenizer(path: str | Path, target: Path) -> None:
    """Write a tokenizer's files into a directory, in the form that transformers reads: with a tokenizer.json.

    Raises:
        TokenizerError: see `read_files`; OSError: the directory cannot be written.
    """
    files = read_files(path)
    source = files.where if files.where.is_file() else None
    if source is not None and source.name == "tokenizer.json":
        (target / source.name).write_bytes(source.read_bytes())
    else:
        (target / "tokenizer.json").write_text(json.dumps(files.spec, ensure_ascii=False), encoding="utf-8")
    for name, settings in files.settings.items():
        if settings and not (target / name).exists():
            (target / name).write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if files.template is not None and "chat_template" not in files.settings["tokenizer_config.json"]:
        (target / TEMPLATE).write_text(files.template, encoding="utf-8")
