"""The byte tokenizer loses nothing and drops what is not text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigError
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.protocol import answer_text

TOKENIZER = ByteTokenizer.Config().build()


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_with_and_without_special_ids(text: str):
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([TOKENIZER.bos, *ids, TOKENIZER.eos, TOKENIZER.pad, 263]) == text


def test_special_ids_are_distinct_and_fit_the_vocabulary():
    assert (TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.pad) == (256, 257, 258)
    assert TOKENIZER.vocab_size == 264


def test_broken_utf8_becomes_the_replacement_character():
    assert TOKENIZER.decode([0xE2, 0x82, 65]) == "\ufffdA"


@pytest.mark.parametrize("token", [-1, 264])
def test_ids_outside_the_vocabulary_are_refused(token: int):
    with pytest.raises(ValueError, match=f"token id {token} is outside"):
        TOKENIZER.decode([65, token])


def test_a_vocabulary_without_room_for_special_ids_is_refused():
    with pytest.raises(ConfigError, match=r"ByteTokenizer\.vocab_size: expected 259 or more: .*, got 256"):
        ByteTokenizer.Config(vocab_size=256).build()


def test_special_tokens_between_the_texts_of_an_answer_are_seen_and_those_at_its_ends_dropped():
    tokenizer = ByteTokenizer.Config().build()
    assert answer_text(tokenizer, [*b"12", tokenizer.eos]) == "12" == answer_text(tokenizer, b"12")
    assert answer_text(tokenizer, [*b"1", tokenizer.pad, *b"2", tokenizer.eos]) == "1\ufffd2"
    assert answer_text(tokenizer, [tokenizer.bos, *b"2", tokenizer.pad, tokenizer.eos]) == "2"
    assert answer_text(tokenizer, [tokenizer.eos]) == answer_text(tokenizer, []) == ""
