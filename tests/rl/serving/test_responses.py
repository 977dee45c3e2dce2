"""`/v1/responses` by the official client: answers are those of chats, whole and as events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from rl.serving.chat_template import ChatTemplate
from tests.rl.serving.running import MODEL, Running, make_engine, running
from tests.rl.serving.test_grammars import LONG, SUM

TOOL: Any = {"type": "function", "name": "add", "description": "adds", "parameters": SUM, "strict": True}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %}{% endfor %}{# <tool_call> #}"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    with running(make_engine(max_new_tokens=LONG), template=ChatTemplate.Config(jinja=str(path))) as served:
        yield served


@pytest.mark.slow
def test_a_text_is_the_chats_with_its_usage(client: openai.OpenAI) -> None:
    extra = {"seed": 5}
    response = client.responses.create(
        model=MODEL, input="hello", instructions="be", max_output_tokens=9, temperature=0.5, extra_body=extra
    )
    messages: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0.5, seed=5)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.instructions, response.temperature) == ("incomplete", "be", 0.5)
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


@pytest.mark.slow
def test_items_are_the_messages_of_a_chat(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "2"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": "so"},
    ]
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    messages: Any = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "so"},
    ]
    response = client.responses.create(model=MODEL, input=items, max_output_tokens=9, extra_body={"seed": 5})
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9, seed=5)
    assert response.output_text == chat.choices[0].message.content


@pytest.mark.slow
def test_forms_and_logprobs(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SUM, "strict": True}}
    include: Any = ["message.output_text.logprobs"]
    response = client.responses.create(model=MODEL, input="hello", text=form, include=include, top_logprobs=2)
    jsonschema.validate(json.loads(response.output_text), SUM)
    message: Any = response.output[0]
    (part,) = message.content
    assert response.status == "completed" and part.logprobs and all(len(one.top_logprobs) == 2 for one in part.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}])
def test_events_tell_what_the_whole_response_says(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": "hello", "extra_body": {"seed": 2}, **fields}
    whole: Any = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events: list[Any] = list(stream)
        final: Any = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}" and whole.usage == final.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    if fields:
        (call,), (streamed,) = whole.output, final.output
        assert call.type == streamed.type == "function_call" and call.name == streamed.name == "add"
        assert call.arguments == streamed.arguments and whole.output_text == ""
        jsonschema.validate(json.loads(call.arguments), SUM)
        again: Any = [{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True)]
        again.append({"type": "function_call_output", "call_id": call.call_id, "output": "4"})
        assert client.responses.create(model=MODEL, input=again, max_output_tokens=4).output
    else:
        assert kinds.count("response.output_item.done") == kinds.count("response.output_text.done") == 1


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": None}, "input", "missing; expected a text, or an array"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "expected 'message', 'function_call' or"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "input[0].content: got a number; expected a"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: got 0; expected an integer from 1"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported by this server"),
        ({"background": True}, "background", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "expected 'function'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type: got 'xml'; expected"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "nothing but 'message.output_text.logprobs'"),
        ({"messages": []}, "messages", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"tempature": 1}, "tempature", "did you mean 'temperature'"),
    ],
)
def test_other_bodies_are_refused_by_field(served: Running, fields: dict[str, Any], param: str, said: str) -> None:
    status, body, _ = served.post("/v1/responses", {"model": MODEL, "input": "hello", **fields})
    assert (status, body["error"]["param"]) == (400, param) and said in body["error"]["message"]


def test_embeddings_are_refused_in_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="its policy has no head for embeddings"):
        client.embeddings.create(model=MODEL, input="hello")
