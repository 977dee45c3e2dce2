"""Completions end at the first token at whose end their text contains a stop string, however they are cut up."""

import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from mesh import UserError
from rl.rollout.decoding.stop_strings import StopText
from tests.axlearn_like.tokenizers.golden_files import tokenizer

BYTES = ByteTokenizer.Config().build()
PHRASES = PhraseTokenizer.Config(phrases=("ab", "€b", "a a stop a", "\n\n")).build()
EOS, PAD = ByteTokenizer.eos, ByteTokenizer.pad

LETTERS = st.text("ab €🙂\n", min_size=1, max_size=5)
STRINGS = st.lists(LETTERS, max_size=3).map(tuple)
# Text, single bytes (most of them broken UTF-8), special tokens without text, and phrases.
PIECES = LETTERS.map(BYTES.encode) | st.sampled_from([97, 98, 0x82, 0xAC, 0xE2, 0xF0, EOS, PAD]).map(lambda i: [i])
TOKENS = st.lists(PIECES | st.integers(259, 262).map(lambda i: [i]), max_size=40).map(lambda ps: sum(ps, []))


def by_definition(strings: Sequence[str], decode: Callable[[Sequence[int]], str], tokens: list[int]) -> int | None:
    for n in range(1, len(tokens) + 1):
        if any(string in decode(tokens[:n]) for string in strings):
            return n
    return None


def in_turns(stop: StopText, tokens: list[int], sizes: list[int]) -> int | None:
    """Search as an engine does: `sizes` tokens more each turn, searched as they come."""
    done = turn = 0
    while done < len(tokens):
        more = sizes[turn % len(sizes)]
        kept = stop.find(tokens[: done + more], done)
        if kept is not None:
            return kept
        done, turn = done + more, turn + 1
    return None


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(STRINGS, TOKENS, st.lists(st.integers(1, 9), min_size=1, max_size=4))
@example(("€",), [*BYTES.encode("a" * 30), *BYTES.encode("€")], [1])
@example(("a" * 5,), [97, *[EOS] * 60, 97, *[PAD] * 60, 97, 97, 97], [2])
@example(("🙂 b",), [*BYTES.encode("€" * 20 + "🙂 b")], [2])
def test_found_where_the_definition_says_however_many_tokens_come_at_once(
    strings: tuple[str, ...], tokens: list[int], sizes: list[int]
):
    stop = StopText(strings, PHRASES.decode)
    expected = by_definition(strings, PHRASES.decode, tokens)
    assert in_turns(stop, tokens, sizes) == expected
    assert stop.find(tokens, 0) == expected


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(deadline=None)
@given(
    STRINGS, st.lists(st.integers(0, 300), max_size=30) | LETTERS, st.lists(st.integers(1, 9), min_size=1, max_size=4)
)
def test_found_across_the_tokens_of_byte_pair_encodings(
    name: str, strings: tuple[str, ...], drawn: list[int] | str, sizes: list[int]
):
    """Drawn at random, with characters cut in two, and as a text is encoded."""
    built = tokenizer(name)
    decode = functools.partial(completion_text, built)
    tokens = built.encode(drawn * 5) if isinstance(drawn, str) else drawn
    stop = StopText(strings, decode)
    expected = by_definition(strings, decode, tokens)
    assert in_turns(stop, tokens, sizes) == expected
    assert stop.find(tokens, 0) == expected


@pytest.mark.parametrize(
    "text, kept",
    [("x STOP y", "x STOP"), ("x ST", None), ("STOP", "STOP"), ("STO STOSTOPSTOP", "STO STOSTOP")],
)
def test_bytes_are_kept_up_to_the_end_of_the_string(text: str, kept: str | None):
    found = StopText(("STOP", "never"), BYTES.decode).find(BYTES.encode(text), 0)
    assert found == (None if kept is None else len(kept))


def test_a_token_is_never_cut():
    tokens = [*PHRASES.encode("x"), *PHRASES.encode("a a stop a"), *PHRASES.encode("y")]
    assert len(tokens) == 3
    assert StopText(("stop",), PHRASES.decode).find(tokens, 1) == 2


def test_a_character_counts_only_when_all_its_bytes_are_there():
    stop, tokens = StopText(("€",), BYTES.decode), BYTES.encode("a€b")
    assert [stop.find(tokens[:n], n - 1) for n in range(1, 5)] == [None, None, None, 4]


def test_a_long_completion_is_not_decoded_again_and_again():
    decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return BYTES.decode(tokens)

    stop, tokens = StopText(("stop",), decode), BYTES.encode("ab" * 2000 + "stop")
    assert in_turns(stop, tokens, [1]) == len(tokens)
    assert decoded < 40 * len(tokens)  # decoding all of it for each token: 2000


@pytest.mark.parametrize("strings", [("",), ("a", ""), ("\ufffd",)], ids=repr)
def test_strings_that_cannot_stop_are_refused(strings: tuple[str, ...]):
    with pytest.raises(UserError, match="stop string '.*': expected at least one character"):
        StopText(strings, BYTES.decode)


def test_without_strings_nothing_stops_and_nothing_is_decoded():
    def decode(tokens: Sequence[int]) -> str:
        raise AssertionError(f"decoded {tokens}")

    assert StopText((), decode).find([1, 2, 3], 0) is None


@pytest.mark.parametrize("old", ["a</call>", "</call></call>", "<//call>x"])
def test_a_string_that_was_whole_before_the_start_does_not_count(old: str):
    """A program goes on behind it, and looks for the next."""
    stop = StopText(("</call>", "/c"), lambda tokens: "".join(map(chr, tokens)))
    for drawn, kept in (("bcd", None), ("b</call>c", 4), ("/call>", 2)):
        found = stop.find([ord(c) for c in old + drawn], len(old))
        assert found == (None if kept is None else len(old) + kept)


def test_a_string_may_begin_before_the_start():
    stop = StopText(("</call>",), lambda tokens: "".join(map(chr, tokens)))
    assert stop.find([ord(c) for c in "ab</ca" + "ll>c"], 6) == 9
