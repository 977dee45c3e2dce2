"""Streams of text: the pieces, joined, are the whole; no piece has to be taken back."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.tokenizers.protocol import completion_text
from rl.serving.output.text import CallStream, CallStyle, TextStream, ToolCall
from tests.axlearn_like.tokenizers.golden_files import tokenizer
from tests.rl.serving.running import TOKENIZER

# Bytes of multi-byte characters, in and out of order, besides letters, a phrase and ids without a text.
IDS = st.lists(st.sampled_from([97, 98, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 256, 257, 259]), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=6)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3)


def pieces(ids: list[int], cuts: list[int], stops: list[str]) -> list[str]:
    stream = TextStream(TOKENIZER.decode, stops)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    starts = [0, *ends[:-1]]
    return [*(stream.push(ids[a:b]) for a, b in zip(starts, ends, strict=True)), stream.finish()]


@settings(deadline=None)  # the machine may be busy
@given(IDS, CUTS)
def test_joined_pieces_are_the_text_of_all_tokens(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(ids, cuts, [])) == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(IDS, CUTS, STOPS)
def test_nothing_of_the_first_stop_string_to_be_complete_is_given(
    ids: list[int], cuts: list[int], stops: list[str]
) -> None:
    """The engine ends at the first token at whose end the text holds a stop string; so do these ids."""
    held = [n for n in range(len(ids) + 1) if any(stop in TOKENIZER.decode(ids[:n]) for stop in stops)]
    ids = ids[: held[0]] if held else ids
    text = TOKENIZER.decode(ids)
    found = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces(ids, cuts, stops)) == text[: min(found, default=len(text))]


ENCODINGS = ("byte_level", "byte_fallback")
WORDS = st.text("ab €🙂é\n", max_size=24)


def parts_of(name: str, text: str, cuts: list[int], stops: list[str]) -> tuple[str, str]:
    """Stream a text's tokens; returns the pieces, joined, and the text of all tokens."""
    decode = functools.partial(completion_text, tokenizer(name))
    ids = tokenizer(name).encode(text)
    ends = [n for n in range(len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)]
    ids = ids[: ends[0]] if ends else ids
    stream = TextStream(decode, stops)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    found = [stream.push(ids[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert not any("\ufffd" in piece for piece in found)  # a character that two tokens share waits for both
    return "".join([*found, stream.finish()]), decode(ids)


@pytest.mark.parametrize("name", ENCODINGS)
@given(text=WORDS, cuts=CUTS)
def test_streams_of_byte_pair_encodings_are_whole(name: str, text: str, cuts: list[int]) -> None:
    streamed, whole = parts_of(name, text, cuts, [])
    assert streamed == whole == (text if name == "byte_level" or not text else f" {text}")


@pytest.mark.parametrize("name", ENCODINGS)
@given(text=WORDS, cuts=CUTS, stops=STOPS)
def test_streams_of_byte_pair_encodings_end_before_a_stop_string(
    name: str, text: str, cuts: list[int], stops: list[str]
) -> None:
    streamed, whole = parts_of(name, text, cuts, stops)
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert streamed == whole[: min(found, default=len(whole))]


def test_half_a_character_waits_for_the_rest() -> None:
    stream = TextStream(TOKENIZER.decode)
    assert stream.push([97, 0xE2]) == "a"
    assert stream.push([0x82]) == ""
    assert stream.push([0xAC]) == "€"
    assert stream.length == 2


def test_the_beginning_of_a_stop_string_waits_until_it_is_none() -> None:
    stream = TextStream(TOKENIZER.decode, ["abc"])
    assert stream.push(b"xab") == "x"
    assert stream.push(b"abd") == "ababd"
    assert stream.push(b"ab") + stream.finish() == "ab"


def test_after_a_stop_string_there_is_nothing() -> None:
    stream = TextStream(TOKENIZER.decode, ["b"])
    assert [stream.push(b"abc"), stream.push(b"d"), stream.finish()] == ["a", "", ""]


ADD, FIND = ToolCall("add", '{"a": 1, "b": [2]}'), ToolCall("find", '{"where": "caf\u00e9 </tool"}')
TAGGED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
OTHER = '<tool_call>{"name": "find", "arguments": {"where": "caf\u00e9 </tool"}}</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 1, "b": [2]}}'
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
ANSWERS: dict[str, tuple[CallStyle, str, list[str | ToolCall]]] = {
    "text": ("tagged", "a < b <tool", ["a < b <tool"]),
    "calls behind text": ("tagged", f"Well: {TAGGED}\n{OTHER}\n", ["Well: ", ADD, FIND]),
    "text between": ("tagged", f"{TAGGED}and{OTHER}", [ADD, "and", FIND]),
    "another function": ("tagged", UNKNOWN, [UNKNOWN]),
    "not JSON": ("tagged", "<tool_call>{</tool_call>.", ["<tool_call>{</tool_call>."]),
    "cut off": ("tagged", TAGGED[:-3], [TAGGED[:-3]]),
    "bare": ("bare", f"\n{BARE}", [ADD]),
    "two bare": ("bare", f"{BARE}; {BARE}", [ADD, ADD]),
    "bare text": ("bare", "No {call}", ["No {call}"]),
    "bare JSON of another kind": ("bare", '{"name": "add", "parameters": 3}', ['{"name": "add", "parameters": 3}']),
    "bare and cut off": ("bare", BARE[:-1], [BARE[:-1]]),
    "nothing": ("bare", "", []),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_told_apart_however_the_text_is_cut(case: str) -> None:
    style, text, expected = ANSWERS[case]
    for size in (1, 2, 7, 1000):
        stream, found = CallStream(style, ["add", "find"]), list[str | ToolCall]()
        for at in range(0, len(text), size):
            found += stream.push(text[at : at + size])
        found += stream.finish()
        joined: list[str | ToolCall] = []
        for part in found:
            last = joined[-1] if joined else None
            if isinstance(part, str) and not isinstance(part, ToolCall) and type(last) is str:
                joined[-1] = last + part
            else:
                joined.append(part)
        assert joined == expected and stream.count == sum(isinstance(part, ToolCall) for part in expected)
