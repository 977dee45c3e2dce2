"""The check that a tokenizer fits the embedding of a model, made once before anything expensive."""

from collections.abc import Iterator

from axlearn_like.config import ConfigBase, ConfigError, path_of, walk_configs
from axlearn_like.tokenizers.protocol import Tokenizer


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
