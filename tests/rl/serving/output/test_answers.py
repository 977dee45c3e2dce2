"""Answers with tool calls, whole and as a stream: the bodies of OpenAI's protocol."""

import json
from typing import Any

import numpy as np
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rl.protocol.messages import FinishReason, Prompt, Rollout
from rl.rollout.request import Request, RequestOutput
from rl.serving.input.request import GenerationJob
from rl.serving.output.answers import Answer
from tests.rl.serving.running import TOKENIZER

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def generation(*, stream: bool) -> GenerationJob:
    request = Request(Prompt(0, "served", np.arange(3, dtype=np.int32)))
    return GenerationJob(requests=(request,), model="m", chat=True, stream=stream, tools=("add",), call_style="tagged")


def rollout(text: str, reason: FinishReason = "stop") -> Rollout:
    tokens = np.asarray(TOKENIZER.encode(text), np.int32)
    size = len(tokens)
    return Rollout(0, 0, tokens, np.zeros(size, np.float32), np.zeros(size, np.int32), np.ones(size, bool), reason)


def whole(text: str, reason: FinishReason = "stop") -> Any:
    body = Answer(generation(stream=False), TOKENIZER, "m", 0).whole(
        [RequestOutput(0, (rollout(text, reason),), scores=(None,))]
    )
    return ChatCompletion.model_validate(body).choices[0]


def test_calls_of_a_whole_answer() -> None:
    choice = whole(f"Well:{CALL}{CALL}")
    assert choice.message.content == "Well:" and choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert first.function.name == "add" and json.loads(first.function.arguments) == {"a": 1} and first.id != second.id
    assert whole(CALL).message.content is None
    assert whole(CALL, "length").finish_reason == "length"
    plain = whole("3")
    assert plain.message.content == "3" and plain.message.tool_calls is None and plain.finish_reason == "stop"


def test_calls_of_a_stream() -> None:
    said = f"Well:{CALL}{CALL}"
    answer, made = Answer(generation(stream=True), TOKENIZER, "m", 0), rollout(said)
    chunks = answer.opening()
    for at in range(0, len(made.tokens), 5):
        chunks += answer.more(0, 0, made.tokens[at : at + 5], made.logprobs[at : at + 5])
    chunks += answer.end(0, RequestOutput(0, (made,), scores=(None,)))
    choices = [ChatCompletionChunk.model_validate(chunk).choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == "Well:"
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert all(call.function and call.function.name == "add" and call.type == "function" for call in calls)
    assert choices[-1].finish_reason == "tool_calls"
