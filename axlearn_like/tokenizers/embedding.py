"""The check that a tokenizer fits the embedding of a model, made once before anything expensive."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase, ConfigError, path_of, walk_configs
from axlearn_like.tokenizers.files import TOKENIZERS, read_files
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError


def check_tokenizer(tokenizer: ConfigBase, model: ConfigBase) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for. More rows than ids are usual.

    Raises:
        ConfigError: gives both sizes; TokenizerError: the tokenizer cannot be built.
    """
    field, rows = next(_sizes(model), ("", None))
    built: Tokenizer = tokenizer.build()
    if rows is not None and built.vocab_size > rows:
        where = path_of(tokenizer)
        said = f"the tokenizer has {built.vocab_size} ids, but the embedding {rows} rows ({path_of(model)}{field})"
        raise ConfigError(
            f"{where}: {said}; take the model's own tokenizer, or a larger vocab_size of the model", where
        )


def tokenizer_fault(folder: Path, rows: int) -> str | None:
    """Return why the tokenizer's files of a model's directory cannot be used with its embedding, if they cannot.

    None too where the directory has no tokenizer. Without the library `tokenizers` only the ids are looked at.
    """
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    try:
        files = read_files(folder)
        vocabulary: Any = files.spec["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        size = 1 + max((*numbers, *(token["id"] for token in files.spec["added_tokens"])), default=-1)
        if size <= rows and find_spec("tokenizers") is not None:
            size = HuggingFaceTokenizer.Config(path=str(folder)).build().vocab_size
    except UserError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError, OverflowError):
        return f"{folder}: the tokenizer's vocabulary cannot be read"
    if size > rows:
        return f"{files.where}: the tokenizer has {size} ids, but the embedding {rows} rows"
    return None


def check_tokenizers(data: ConfigBase, model: ConfigBase) -> None:
    """Refuse such a tokenizer of any source of training data."""
    for _, cfg in walk_configs(data):
        if isinstance(found := getattr(cfg, "tokenizer", None), ConfigBase):
            check_tokenizer(found, model)


def _sizes(model: ConfigBase) -> Iterator[tuple[str, int]]:
    """Yield the path and value of each `vocab_size` of a model, the outermost first."""
    for path, cfg in walk_configs(model):
        if isinstance(rows := getattr(cfg, "vocab_size", None), int):
            yield f".{path}.vocab_size".replace("..", "."), rows
