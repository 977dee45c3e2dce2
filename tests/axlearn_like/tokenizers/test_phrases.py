"""Phrases become one token, everything else stays bytes, and nothing is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigError
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer

PHRASES = ("What is ", "What is the sum of ", "?\n")


@settings(deadline=None)
@given(st.text(alphabet="What is the sum of 12?\né"))
def test_round_trip(text):
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES).build()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_longest_phrase_wins_and_the_rest_is_bytes():
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES).build()
    assert tokenizer.encode("What is the sum of 12?\n") == [260, ord("1"), ord("2"), 261]
    assert tokenizer.encode("What is 1") == [259, ord("1")]
    assert tokenizer.decode([tokenizer.bos, 259, ord("1"), tokenizer.eos]) == "What is 1"


def test_without_phrases_it_is_the_byte_tokenizer():
    assert PhraseTokenizer.Config().build().encode("é") == list("é".encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phrases": ("a", "a")}, "different phrases"),
        ({"phrases": ("",)}, "none of them empty"),
        ({"phrases": ("abc", "def"), "vocab_size": 260}, "vocab_size: expected 261 or more with 2 phrases, got 260"),
    ],
)
def test_bad_phrases_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        PhraseTokenizer.Config(**changes).build()


def test_the_digest_follows_everything_that_ids_depend_on():
    configs = [
        ByteTokenizer.Config(),
        ByteTokenizer.Config(vocab_size=300),
        PhraseTokenizer.Config(),
        PhraseTokenizer.Config(phrases=PHRASES),
        PhraseTokenizer.Config(phrases=PHRASES[::-1]),
    ]
    tokenizers: list[Tokenizer] = [cfg.build() for cfg in configs]
    assert len({tokenizer.digest for tokenizer in tokenizers}) == len(configs)
    assert [tokenizer.digest for tokenizer in tokenizers] == [cfg.clone().build().digest for cfg in configs]
