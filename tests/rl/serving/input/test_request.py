"""Bodies to requests: what is asked for reaches the engine, and what cannot be is refused by name."""

import dataclasses
import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.rollout.decoding.grammar import Grammars
from rl.rollout.request import StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.adapters import ServedAdapters
from rl.serving.chat_template import ChatTemplate
from rl.serving.context import ServingContext
from rl.serving.errors import ApiError
from rl.serving.input.prompts import detokenized, prompt_id, tokenized
from rl.serving.input.request import _NEUTRAL, _NEUTRAL_CHAT, _NEUTRAL_COMPLETION, GenerationJob, parse
from rl.tasks.encoding import encode_prompt
from tests.axlearn_like.tokenizers.golden_files import CONVERSATIONS, rendered, tokenizer
from tests.rl.serving.running import TOKENIZER

SERVED = ServingContext(
    models=ServedAdapters("tiny"),
    tokenizer=TOKENIZER,
    template=ChatTemplate.Config().build(tokenizer=TOKENIZER),
    max_prompt_tokens=12,
    max_new_tokens=6,
    stop_tokens=(TOKENIZER.eos,),
    sampler=Sampler.Config(temperature=0.5),
    max_samples=8,
    deadline=60.0,
    grammars=Grammars(TOKENIZER),
)
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "2+2?"}]}


def completion(**fields: Any) -> GenerationJob:
    return parse(PROMPT | fields, SERVED, chat=False)


def chat(**fields: Any) -> GenerationJob:
    return parse(CHAT | fields, SERVED, chat=True)


def test_the_defaults_are_the_servers() -> None:
    (request,) = completion().requests
    assert request.prompt.tokens.tolist() == [TOKENIZER.bos, *b"hello"]
    assert request.prompt.tokens.dtype == np.int32
    assert request.samples == 1
    assert request.sampler is None
    assert request.stop == StopConditions(tokens=(TOKENIZER.eos,), strings=(), max_new_tokens=6)
    assert request.deadline == 60.0
    assert 0 <= request.seed < 2**32


def test_without_a_seed_answers_differ_and_with_one_they_do_not() -> None:
    assert len({completion().requests[0].seed for _ in range(20)}) > 1
    assert completion(seed=2**32 - 1).requests[0].seed == 2**32 - 1


def test_every_rule_reaches_the_engine() -> None:
    (request,) = completion(
        n=3, temperature=0, top_p=0.5, top_k=7, min_p=0.25, repetition_penalty=1.5, logit_bias={"5": -100, "3": 1.5},
        stop=["\n", "end"], stop_token_ids=[10, 10], max_tokens=4, seed=9, deadline=1.5,
    ).requests  # fmt: skip
    assert request.sampler == Sampler.Config(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        logit_bias=((3, 1.5), (5, -100.0)),
    )
    assert request.stop == StopConditions(tokens=(TOKENIZER.eos, 10), strings=("\n", "end"), max_new_tokens=4)
    assert (request.samples, request.seed, request.deadline) == (3, 9, 1.5)


def test_a_rule_that_is_left_open_is_the_servers() -> None:
    assert completion(top_k=3).requests[0].sampler == Sampler.Config(temperature=0.5, top_k=3)


def test_prompts_are_texts_or_token_ids_or_several_of_either() -> None:
    def tokens(prompt: Any) -> list[list[int]]:
        return [request.prompt.tokens.tolist() for request in completion(prompt=prompt).requests]

    hello = [TOKENIZER.bos, *b"hello"]
    assert tokens("hello") == [hello]
    assert tokens(hello) == [hello]
    assert tokens(["hello", "a"]) == [hello, [TOKENIZER.bos, 97]]
    assert tokens([[1, 2], "a"]) == [[1, 2], [TOKENIZER.bos, 97]]


def test_a_question_of_a_chat_is_encoded_as_in_training() -> None:
    for content in ("2+2?", [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]):
        (request,) = chat(messages=[{"role": "user", "content": content, "name": None}]).requests
        assert request.prompt.tokens.tolist() == encode_prompt("2+2?", TOKENIZER).tolist()


def test_a_prompts_id_is_a_function_of_its_tokens() -> None:
    tokens = np.asarray([1, 2, 3], np.int32)
    assert prompt_id(tokens) == prompt_id(tokens.astype(np.int64)) == 7732165139150216911
    assert prompt_id(tokens) != prompt_id(tokens[:2])
    assert 0 <= prompt_id(np.arange(5)) < 2**63


def test_the_forms_of_an_answer() -> None:
    streamed = completion(stream=True, stream_options={"include_usage": True}, logprobs=0, return_token_ids=True)
    assert (streamed.stream, streamed.usage_in_stream, streamed.logprobs, streamed.token_ids) == (True, True, 0, True)
    assert not completion(stream=True, stream_options={}).usage_in_stream
    assert chat(logprobs=True).logprobs == chat(logprobs=True, top_logprobs=0).logprobs == 0
    assert chat(logprobs=False).logprobs is None and chat(logprobs=True, top_logprobs=3).logprobs == 3
    usage = completion(stream=True, stream_options={"continuous_usage_stats": True})
    assert usage.continuous_usage and usage.usage_in_stream
    assert chat(max_completion_tokens=2, max_tokens=2).requests[0].stop == StopConditions((TOKENIZER.eos,), (), 2)


def test_fields_that_ask_for_nothing_pass() -> None:
    completion(user="me", echo=False, suffix="", best_of=1, frequency_penalty=0.0, presence_penalty=0)
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, metadata={"a": "b"}, store=False)


def test_every_field_that_is_not_supported_may_ask_for_nothing() -> None:
    for own, parsed in ((_NEUTRAL_COMPLETION, completion), (_NEUTRAL_CHAT, chat)):
        for name, values in (_NEUTRAL | own).items():
            for value in (None, *values):
                assert parsed(**{name: value}).requests
    (request,) = completion(add_special_tokens=False).requests
    assert request.prompt.tokens.tolist() == [*b"hello"]


JINJA = dataclasses.replace(
    SERVED,
    tokenizer=tokenizer("byte_level", "qwen25"),
    template=ChatTemplate.Config().build(tokenizer=tokenizer("byte_level", "qwen25")),
    max_prompt_tokens=800,
)


def jinja_chat(**fields: Any) -> list[int]:
    return parse(CHAT | fields, JINJA, chat=True).requests[0].prompt.tokens.tolist()


def test_a_chat_with_a_template_in_jinja_is_what_transformers_makes_of_it() -> None:
    case = dict(CONVERSATIONS["tools"])
    assert jinja_chat(**case) == rendered()["byte_level | qwen25 | tools"]["ids"]
    last = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two, "}]
    expected = rendered()["byte_level | qwen25 | goes on with the last message"]["ids"]
    assert jinja_chat(messages=last, continue_final_message=True) == expected


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": ["a"]}, "tools", "expected an array of objects"),
        ({"documents": {"a": 1}}, "documents", "expected an array of objects"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "expected an object"),
        ({"tools": [{"a": "\ud800"}]}, "tools", "half of a surrogate pair"),
        ({"documents": [functools.reduce(lambda inner, _: [inner], range(99), {})]}, "documents", "an array of obj"),
        ({"tools": [{"a": functools.reduce(lambda inner, _: [inner], range(99), 1)}]}, "tools", "nested too deeply"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": "a" * 999}]}, "messages", "this server takes 1 to 800"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "messages", "exclude each other"),
    ],
)
def test_what_a_template_in_jinja_cannot_take_is_refused(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError, match=re.escape(said)) as caught:
        jinja_chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing; expected 'tiny'"),
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": []}, "prompt", "expected a string, token ids"),
    ({"prompt": 5}, "prompt", "got 5"),
    ({"prompt": "x" * 12}, "prompt", "13 tokens; this server takes 1 to 12"),
    ({"prompt": [[]]}, "prompt[0]", "0 tokens"),
    ({"prompt": [1, 272]}, "prompt", "got 272; expected token ids from 0 to 271"),
    ({"prompt": [1, -1]}, "prompt", "got -1"),
    ({"prompt": ["a", 5]}, "prompt[1]", "got a number; expected a string"),
    ({"prompt": "\udfff"}, "prompt", "half of a surrogate pair"),
    ({"prompt": ["a"] * 9}, "prompt", "9 prompts"),
    ({"n": 0}, "n", "got 0; expected an integer from 1 to 8"),
    ({"n": 9}, "n", "expected an integer from 1 to 8"),
    ({"n": 5, "prompt": ["a", "b"]}, "n", "5 completions of 2 prompts; this server makes at most 8"),
    ({"max_tokens": 7}, "max_tokens", "expected an integer from 1 to 6 (the most that this server generates is 6)"),
    ({"max_tokens": 0}, "max_tokens", "got 0"),
    ({"seed": 1.5}, "seed", "expected an integer from -9223372036854775808 to 9223372036854775807"),
    ({"temperature": -0.1}, "temperature", "expected a number from 0 to 100"),
    ({"temperature": 0.001}, "temperature", "expected 0 (greedy) or 0.01 and more"),
    ({"temperature": float("nan")}, "temperature", "got nan"),
    ({"top_p": 0}, "top_p", "above 0 and up to 1"),
    ({"top_k": -2}, "top_k", "expected an integer from -1 to 2147483647"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "expected a number"),
    ({"logit_bias": {"272": 1}}, "logit_bias", "got the key '272'; expected token ids from 0 to 271"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "got the key 'a'"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "got 101 for token 1; expected a number from -100 to 100"),
    ({"logit_bias": [1]}, "logit_bias", "expected an object"),
    ({"stop": ""}, "stop", "0 characters"),
    ({"stop": "a\ufffd"}, "stop", "U+FFFD"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [1]}, "stop", "expected a string"),
    ({"stop_token_ids": [999]}, "stop_token_ids", "expected token ids"),
    ({"deadline": 61}, "deadline", "above 0 and up to 60"),
    ({"stream": "yes"}, "stream", "expected true or false"),
    ({"stream_options": {}}, "stream_options", "given without stream=true"),
    ({"stream": True, "stream_options": {"includ_usage": True}}, "stream_options.includ_usage", "did you mean"),
    ({"logprobs": 21}, "logprobs", "got 21; expected an integer from 0 to 20"),
    ({"logprobs_mode": "raw_logits"}, "logprobs_mode", "expected 'raw_logprobs' or 'processed_logprobs'"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "expected an integer from 0 to 20"),
    ({"prompt_logprobs": 0, "stream": True}, "stream", "log-probabilities of a prompt are not given in a stream"),
    ({"echo": True, "logprobs": 0, "stream": True}, "stream", "leave one of them out"),
    ({"max_tokens": 0}, "max_tokens", "got 0; expected an integer from 1 to 6"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "expected an integer from 0 to 2, the most that the request"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "expected a number from -2 to 2"),
    ({"presence_penalty": "much"}, "presence_penalty", "expected a number from -2 to 2"),
    ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
    ({"messages": []}, "messages", "unknown field 'messages'"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing; expected an array of messages"),
    ({"messages": None, "mesages": []}, "messages", "was it meant by 'mesages'?"),
    ({"messages": 5}, "messages", "expected an array of messages"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": ["hi"]}, "messages[0]", "is a string; expected an object"),
    ({"messages": [{"role": "usr", "content": ""}]}, "messages[0].role", "unknown role 'usr'; did you mean 'user'"),
    ({"messages": [{"content": ""}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got a number; expected a string"),
    ({"messages": [{"role": "user", "content": "", "nmae": 1}]}, "messages[0].nmae", "unknown field"),
    ({"messages": [{"role": "user", "content": "x" * 12}]}, "messages", "14 tokens; this server takes 1 to 12"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url",
        "unknown field",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type", "type 'text'"),
    ({"top_logprobs": 0}, "top_logprobs", "given without logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected an integer from 0 to 20"),
    ({"echo": True}, "echo", "not supported"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "is 3, but max_tokens is 2"),
    ({"tools": [{"type": "function"}]}, "tools", "needs a chat template in Jinja"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "needs a chat template in Jinja"),
    ({"continue_final_message": True}, "continue_final_message", "needs a chat template in Jinja"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name", "unknown field"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "expected 'text', 'json_object' or"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing; expected an object with a"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "none of them empty"),
    ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json", "x"),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "b"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "there is guided_regex, too; expected one form"),
    ({"guided_json": 5}, "guided_json", "expected a JSON schema"),
    ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "expected a function of the tools",
    ),
    ({"tool_choice": "always"}, "tool_choice", "expected 'auto', 'none', 'required', or an object"),
]


@pytest.mark.parametrize(("fields", "param", "said"), BAD_COMPLETIONS, ids=lambda v: str(v)[:40])
def test_a_bad_completion_is_refused_by_field(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message and param in caught.value.message


@pytest.mark.parametrize(("fields", "param", "said"), BAD_CHATS, ids=lambda v: str(v)[:40])
def test_a_bad_chat_is_refused_by_field(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message and param in caught.value.message


KNOWN = (
    "model prompt messages role content type text n seed stop stop_token_ids max_tokens max_completion_tokens deadline "
    "temperature top_p top_k min_p repetition_penalty logit_bias stream stream_options include_usage logprobs "
    "top_logprobs return_token_ids user tools response_format echo prompt_logprobs logprobs_mode min_tokens "
    "structured_outputs json regex choice grammar guided_json guided_regex tool_choice function name 5"
).split()
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.sampled_from(["tiny", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=5), st.booleans())
def test_any_json_is_a_request_or_refused(fields: dict[str, Any], for_chat: bool) -> None:
    try:
        generation = parse((CHAT if for_chat else PROMPT) | fields, SERVED, chat=for_chat)
    except ApiError as error:
        assert error.status in (400, 404) and error.message
        json.dumps(error.body(), allow_nan=False)
    else:
        for request in generation.requests:
            assert 1 <= len(request.prompt.tokens) <= SERVED.max_prompt_tokens
            assert (request.sampler or SERVED.sampler).build() is not None


def test_another_model_is_not_found() -> None:
    with pytest.raises(ApiError, match="no model 'tny' here; this server has 'tiny'") as caught:
        completion(model="tny")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("value", [-1, 0])
def test_all_tokens_are_asked_for_as_vllm_does(value: int) -> None:
    assert completion(top_k=value).requests[0].sampler is None
    limited = dataclasses.replace(SERVED, sampler=Sampler.Config(top_k=3))
    (request,) = parse(PROMPT | {"top_k": value}, limited, chat=False).requests
    assert request.sampler is not None and request.sampler.top_k == TOKENIZER.vocab_size


@pytest.mark.parametrize(
    ("seed", "used"), [(5, 5), (2**32 - 1, 2**32 - 1), (2**32 + 5, 5), (-2, 2**32 - 2), (2**63 - 1, 2**32 - 1)]
)
def test_any_seed_of_64_bits_is_taken(seed: int, used: int) -> None:
    assert completion(seed=seed).requests[0].seed == used


def test_a_seed_of_minus_one_is_none() -> None:
    assert len({completion(seed=-1).requests[0].seed for _ in range(4)}) > 1
    with pytest.raises(ApiError, match="seed"):
        completion(seed=2**63)


def test_ends_can_be_ignored() -> None:
    for ids in ([], [7]):
        stop = completion(ignore_eos=True, stop_token_ids=ids).requests[0].stop
        assert stop is not None and stop.tokens == tuple(ids)


def test_texts_and_conversations_become_ids_and_back() -> None:
    found = tokenized({"model": "tiny", "prompt": "héllo"}, SERVED)
    assert found["tokens"] == [TOKENIZER.bos, *"héllo".encode()] and found["count"] == 7
    assert found["max_model_len"] == 18
    assert tokenized({"prompt": "hi", "add_special_tokens": False}, SERVED)["tokens"] == list(b"hi")
    prompt = chat().requests[0].prompt
    assert prompt is not None
    assert tokenized({"messages": CHAT["messages"]}, SERVED)["tokens"] == prompt.tokens.tolist()
    assert detokenized({"tokens": found["tokens"]}, SERVED) == {"prompt": "héllo"}
    for body in ({}, {"prompt": 3}, {"prompt": "a", "promt": "b"}, {"model": "other", "prompt": "a"}):
        with pytest.raises(ApiError):
            tokenized(body, SERVED)
    for ids in (None, "1", [-1], [10**6], [1.5], [True]):
        with pytest.raises(ApiError):
            detokenized({"tokens": ids}, SERVED)
