"""Events of calls continue those of shorter texts, and say what the form reads in the whole text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.environments.calls import CallForm, FencedCalls, JsonCalls, TextCalls
from rl.environments.streaming.events import ArgumentPart, Event, Finished, Invalid, Started

FORMS: dict[str, CallForm] = {
    "text": TextCalls.Config().build(),
    "json": JsonCalls.Config().build(),
    "fenced": FencedCalls.Config(languages=("python", "py")).build(),
}
PIECES = {
    "text": ["<tool>", "</tool>", "<tool", "search", ":", " ", "\n", "a", "<", "<result>"],
    "json": ["<tool_call>", "</tool_call>", "</tool", '{"name": "f"', ', "arguments": {', '"a": "', "\\n", "\\\\", '"',
             "}", "12", "1e5", "-", "[1, 2]", "null", ",", ":", " ", "\n", "x", "\\u00e9", '{"arguments": {"b": "y'],
    "fenced": ["```", "```python\n", "```py\n", "\n", "x = 1", "```json\n", "`", " "],
}  # fmt: skip


def texts(form: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(PIECES[form]), max_size=25).map("".join)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_known_of_a_text_stays_true_of_a_longer_one(form: str, data: Any) -> None:
    text = data.draw(texts(form))
    whole = FORMS[form].events(text)
    for length in range(len(text) + 1):
        events = FORMS[form].events(text[:length])
        assert events == whole[: len(events)]
        assert all(event.end <= length for event in events)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_finished_calls_are_those_that_the_form_reads(form: str, data: Any) -> None:
    text = data.draw(texts(form))
    calls, events = FORMS[form].calls(text), FORMS[form].events(text)
    finished = {event.number for event in events if isinstance(event, Finished)}
    for event in events:
        if isinstance(event, Finished):
            assert FORMS[form].calls(event.source) == [calls[event.number]]
            assert text[: event.end].endswith(event.source)
        if isinstance(event, Started) and event.number in finished and not calls[event.number].error:
            assert event.tool == calls[event.number].tool


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3),
    max_leaves=6,
)
LINES = st.text(alphabet='a\n\\"é\t<', max_size=12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(arguments=st.dictionaries(st.text(min_size=1, max_size=4), LINES | JSON, max_size=4), ascii=st.booleans())
def test_a_json_call_comes_by_key_and_value_and_texts_by_lines(arguments: dict[str, Any], ascii: bool) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii)
    if "<tool_call>" in body or "</tool_call>" in body:
        return
    events = FORMS["json"].events(f"hm <tool_call>{body}</tool_call>")
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    found: dict[str, str] = {}
    for event in events[1:-1]:
        assert isinstance(event, ArgumentPart)
        assert event.text.count("\n") == event.text.endswith("\n") or not isinstance(arguments[event.name], str)
        found[event.name] = found.get(event.name, "") + event.text
    assert list(found) == list(arguments)
    for name, value in arguments.items():
        assert found[name] == value if isinstance(value, str) else json.loads(found[name]) == value


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("[1", "expected '{'"),
        ('{"name" 1', "expected ':'"),
        ('{"name": 5', "the name is no text"),
        ('{"name": "f", "arguments": {"a": x', "expected a value"),
        ('{"name": "f", "arguments": {"a": 1]', "expected '}'"),
        ('{"name": "f"} and', "behind the JSON object"),
        ('{"name": "a\\q"', "Invalid"),
    ],
)
def test_json_that_nothing_can_mend_is_invalid_at_once(body: str, why: str) -> None:
    *_, last = FORMS["json"].events(f"<tool_call>{body}")
    assert isinstance(last, Invalid) and why in last.why
    whole = FORMS["json"].calls(f'<tool_call>{body}"}}}}</tool_call>')
    assert whole[0].error


def test_a_text_call_loses_the_blanks_around_it_and_a_fenced_one_keeps_them() -> None:
    events = FORMS["text"].events("<tool>python:  \n x = 1\n y\n</tool>")
    assert [event.text for event in events if isinstance(event, ArgumentPart)] == ["x = 1\n", " y\n", ""]
    events = FORMS["fenced"].events("```python\n  x = 1\n```")
    assert [event.text for event in events if isinstance(event, ArgumentPart)] == ["  x = 1"]
    assert kinds(FORMS["fenced"].events("```json\n{}\n```\n```py\n1\n")) == ["Started"]
    assert kinds(FORMS["fenced"].events("```json\n{}\n```\n```py\n1\n234")) == ["Started", "ArgumentPart"]
