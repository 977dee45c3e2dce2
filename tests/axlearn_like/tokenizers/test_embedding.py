"""A tokenizer that does not fit the embedding is refused from the top, with both sizes."""

import pytest

from axlearn_like.config import ConfigError, label
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.embedding import check_tokenizer
from experiments.registry import get
from models.tiny import tiny


def test_more_rows_than_ids_are_usual() -> None:
    for rows in (264, 300):
        check_tokenizer(ByteTokenizer.Config(), tiny(vocab_size=rows))
    with pytest.raises(ConfigError, match=r"the tokenizer has 264 ids, but the embedding 263 rows"):
        check_tokenizer(ByteTokenizer.Config(), tiny(vocab_size=263))


@pytest.mark.parametrize(("name", "tokenizer"), [("demo", "tokenizer"), ("demo_sft", "input.source.tokenizer")])
def test_an_experiment_is_refused_before_it_is_built(name: str, tokenizer: str) -> None:
    cfg = label(get(name), name)
    model = "policy" if name == "demo" else "model"
    getattr(cfg, model).set(vocab_size=200)
    if name == "demo":
        cfg.set(warm_start=None)
    said = (
        rf"^{name}\.{tokenizer}: the tokenizer has 272 ids, but the embedding 200 rows \({name}\.{model}\.vocab_size\)"
    )
    with pytest.raises(ConfigError, match=said):
        cfg.check()
