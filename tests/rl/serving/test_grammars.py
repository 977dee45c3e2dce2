"""Forms of answers through the server: by jsonschema and `re`, whole and as streams, beside other requests."""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from rl.serving.chat_template import ChatTemplate
from tests.rl.serving.running import MODEL, QUESTION, TOKENIZER, Running, make_engine, running

pytestmark = pytest.mark.slow

LONG = 300
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 1, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "people", "tags"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "exact": {"type": "boolean"}},
    "required": ["a", "exact"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SUM}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
]
STYLES = {"tagged": "<tool_call>", "bare": "<|python_tag|>", "neither": ""}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(make_engine(max_new_tokens=LONG)) as served:
        yield served


def said(client: openai.OpenAI, **fields: Any) -> list[str]:
    """Return the contents of four answers, of which each has ended by itself."""
    answer: Any = client.chat.completions.create(model=MODEL, messages=QUESTION, n=4, seed=2, **fields)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    return [choice.message.content for choice in answer.choices]


def test_json_by_a_schema_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    texts = said(client, response_format=form)
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)
    assert len(set(texts)) > 1
    options: Any = {"model": MODEL, "messages": QUESTION, "n": 4, "seed": 2, "response_format": form, "stream": True}
    streamed = [""] * 4
    for chunk in client.chat.completions.create(**options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_any_object_is_json_even_if_the_policy_would_end_at_once(client: openai.OpenAI) -> None:
    eager = {str(token): 20 for token in (*b'{}",', 256, 257)}
    for text in said(client, response_format={"type": "json_object"}, logit_bias=eager):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[xyz]+!"}}, "[0-9]{3}-[xyz]+!"),
        ({"guided_regex": "(ab|cd){2}"}, "(ab|cd){2}"),
        ({"structured_outputs": {"choice": ["yes", 'no "or" not', "é"]}}, 'yes|no "or" not|é'),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"grammar": 'start: "a" more\nmore: "b" | "c" more'}}, "ac*b"),
        ({"guided_grammar": 'start: ("1" | "2") "0"'}, "[12]0"),
        ({"structured_outputs": {"json": {"enum": [1, "x"]}}}, '1|"x"'),
        ({"guided_json": json.dumps({"const": [True]})}, r"\[\s*true\s*\]"),
    ],
)
def test_other_forms_for_chats_and_completions(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    assert all(re.fullmatch(pattern, text) for text in said(client, extra_body=fields))
    answer = client.completions.create(model=MODEL, prompt="hello", n=4, seed=1, extra_body=fields)
    whole = [choice.text for choice in answer.choices if choice.finish_reason == "stop"]  # a loop may be cut
    assert whole and all(re.fullmatch(pattern, text) for text in whole)


@pytest.mark.full
def test_requests_without_a_form_are_the_same_beside_those_with_one(client: openai.OpenAI) -> None:
    def plain(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt="hello", seed=seed, max_tokens=60).choices[0].text

    def formed(seed: int) -> str:
        answer = client.completions.create(model=MODEL, prompt="hello", seed=seed, extra_body={"guided_json": CITY})
        return answer.choices[0].text

    alone, forms = [plain(seed) for seed in range(6)], [formed(seed) for seed in range(6)]
    with ThreadPoolExecutor(12) as pool:
        tasks = [(pool.submit(plain, seed), pool.submit(formed, seed)) for seed in range(6)]
        together = [(one.result(), other.result()) for one, other in tasks]
    assert together == list(zip(alone, forms, strict=True))


def test_a_form_in_any_company_of_fields(client: openai.OpenAI) -> None:
    """Least lengths, stop tokens, greedy draws, penalties and alternatives: none of them breaks it."""
    fields = {"min_tokens": 60, "stop_token_ids": [122], "repetition_penalty": 1.5, "guided_json": SUM}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=4, temperature=0.5, frequency_penalty=1.5, logit_bias={"122": 50},
        logprobs=True, top_logprobs=5, seed=1, extra_body=fields,
    )  # fmt: skip
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SUM)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 5 for entry in choice.logprobs.content)


def test_a_word_that_is_a_stop_token_ends_the_form_where_nothing_else_may_follow(client: openai.OpenAI) -> None:
    extra = {"stop_token_ids": [97], "guided_regex": "[xy]a+"}
    answer = client.completions.create(model=MODEL, prompt="hello", extra_body=extra)
    assert re.fullmatch("[xy]", answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "style", ["tagged", pytest.param("bare", marks=pytest.mark.full), pytest.param("neither", marks=pytest.mark.full)]
)
def test_calls_are_forced_in_the_policys_form(style: str, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{# " + STYLES[style] + " #}")
    with running(make_engine(max_new_tokens=LONG), template=ChatTemplate.Config(jinja=str(path))) as served:
        client = served.client()
        options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "seed": 3, "n": 3}
        options["logit_bias"] = {str(TOKENIZER.eos): 20}  # not calls for ever
        named: Any = {"type": "function", "function": {"name": "now"}}
        forced: list[tuple[Any, set[str]]] = [("required", {"add", "now"}), (named, {"now"})]
        for choice, names in forced:
            answer: Any = client.chat.completions.create(**options, tool_choice=choice)
            for one in answer.choices:
                assert one.finish_reason == "tool_calls" and not one.message.content and one.message.tool_calls
                for call in one.message.tool_calls:
                    assert call.function.name in names
                    jsonschema.validate(
                        json.loads(call.function.arguments), SUM if call.function.name == "add" else EMPTY
                    )
        options |= {"tool_choice": "required", "parallel_tool_calls": False}
        alone: Any = client.chat.completions.create(**options)
        assert all(len(one.message.tool_calls) == 1 for one in alone.choices)
        calls: dict[tuple[int, int], str] = {}
        for chunk in client.chat.completions.create(**options, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                calls[chunk.choices[0].index, call.index] = f"{call.function.name} {call.function.arguments}"  # pyright: ignore
        functions = [one.message.tool_calls[0].function for one in alone.choices]
        assert list(map(calls.get, ((i, 0) for i in range(3)))) == [f"{f.name} {f.arguments}" for f in functions]


def test_without_the_library_a_form_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with running() as served:
        status, body, _ = served.post("/v1/completions", {"model": MODEL, "prompt": "a", "guided_choice": ["b"]})
        assert status == 400 and "grammars need llguidance, which is not installed" in body["error"]["message"]
        assert served.post("/v1/completions", {"model": MODEL, "prompt": "a"})[0] == 200
