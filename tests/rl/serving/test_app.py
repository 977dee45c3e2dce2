"""The endpoint as clients see it, most of it through the official client."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from rl.protocol.messages import Rollout
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.errors import ApiError
from tests.axlearn_like.tokenizers import hostile_tokenizers
from tests.rl.serving.running import (
    MODEL,
    QUESTION,
    TOKENIZER,
    Running,
    as_prompt,
    eventually,
    make_engine,
    make_params,
    metric,
    running,
)

EOS = TOKENIZER.eos
LONG = 1000  # tokens


@pytest.fixture(scope="module")
def reference() -> Any:
    """An engine like the server's."""
    return make_engine()


def rollouts(reference: Any, text: str, samples: int = 1, strings: tuple[str, ...] = ()) -> list[Rollout]:
    """Return the engine's rollouts for the same request as the server's, with seed 5."""
    stop = StopConditions(tokens=(EOS,), strings=strings, max_new_tokens=24)
    return reference.generate([Request(as_prompt(text), samples=samples, seed=5, stop=stop)])


def from_the_midst(text: str) -> str:
    """A part of the text that begins behind its first character and is whole."""
    return next(text[i : i + 2] for i in range(1, len(text)) if text[i : i + 2].isascii())


# ---- answers


def test_a_completion_is_the_engines(client: openai.OpenAI, reference: Any) -> None:
    (expected,) = rollouts(reference, "hello")
    answer = client.completions.create(model=MODEL, prompt="hello", seed=5)
    (choice,) = answer.choices
    assert choice.text == TOKENIZER.decode(expected.tokens)
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, len(expected.tokens))
    assert answer.system_fingerprint == "weights-3"


def test_a_chat_asks_what_training_asks(client: openai.OpenAI, reference: Any) -> None:
    (expected,) = rollouts(reference, "2+2?\n")
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, seed=5)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TOKENIZER.decode(expected.tokens))
    assert answer.usage is not None and answer.usage.total_tokens == 6 + len(expected.tokens)


def test_log_probabilities_are_the_engines_one_for_each_token(client: openai.OpenAI, reference: Any) -> None:
    (expected,) = rollouts(reference, "hello")
    extra = {"return_token_ids": True}
    answer = client.completions.create(model=MODEL, prompt="hello", seed=5, logprobs=0, extra_body=extra)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs == expected.logprobs.tolist()
    assert logprobs.tokens == [TOKENIZER.decode([token]) for token in expected.tokens]
    assert logprobs.top_logprobs is None
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    assert answer.choices[0].model_extra == {"token_ids": expected.tokens.tolist()}

    (expected,) = rollouts(reference, "2+2?\n")
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, logprobs=True, top_logprobs=0)
    entries = chat.choices[0].logprobs
    assert entries is not None and entries.content is not None
    assert [entry.logprob for entry in entries.content] == expected.logprobs.tolist()
    said = b"".join(bytes(entry.bytes or ()) for entry in entries.content)  # characters of several tokens too
    assert said.decode(errors="replace") == chat.choices[0].message.content


def test_samples_differ_and_are_the_engines(client: openai.OpenAI, reference: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", seed=5, n=3)
    expected = [TOKENIZER.decode(rollout.tokens) for rollout in rollouts(reference, "hello", samples=3)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(expected)) > 1


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, reference: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=["hello", "a"], seed=5, n=2)
    expected = [*rollouts(reference, "hello", samples=2), *rollouts(reference, "a", samples=2)]
    assert [choice.text for choice in answer.choices] == [TOKENIZER.decode(r.tokens) for r in expected]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, sum(len(r.tokens) for r in expected))


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str:
        return client.completions.create(model=MODEL, prompt="hello", **fields).choices[0].text

    assert ask(seed=8) == ask(seed=8)
    assert len({ask(seed=seed) for seed in range(4)}) > 1
    assert len({ask() for _ in range(4)}) > 1


def test_the_text_ends_before_a_stop_string_and_the_tokens_with_it(client: openai.OpenAI, reference: Any) -> None:
    text = TOKENIZER.decode(rollouts(reference, "hello")[0].tokens)
    stop = from_the_midst(text)
    (expected,) = rollouts(reference, "hello", strings=(stop,))
    answer = client.completions.create(model=MODEL, prompt="hello", seed=5, stop=stop, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == text[: text.find(stop)] != text
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.token_logprobs == expected.logprobs.tolist()


@pytest.mark.slow
def test_sampling_rules_are_obeyed(client: openai.OpenAI) -> None:
    only = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, logit_bias={"65": 100})
    assert (only.choices[0].text, only.choices[0].finish_reason) == ("AAAAA", "length")
    best = {client.completions.create(model=MODEL, prompt="hello", temperature=0).choices[0].text for _ in range(2)}
    assert len(best) == 1
    first = {
        client.completions.create(model=MODEL, prompt="hello", max_tokens=1, extra_body={"top_k": 1}).choices[0].text
        for _ in range(5)
    }
    assert len(first) == 1


@pytest.mark.slow
def test_answers_in_company_are_the_answers_alone(served: Running, reference: Any) -> None:
    texts = [f"{i} and {i}" for i in range(12)]

    async def ask_all() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)

        async def ask(text: str, stream: bool) -> str:
            if not stream:
                answer = await client.completions.create(model=MODEL, prompt=text, seed=5)
                return answer.choices[0].text
            pieces = await client.completions.create(model=MODEL, prompt=text, seed=5, stream=True)
            return "".join([chunk.choices[0].text async for chunk in pieces])

        return list(await asyncio.gather(*(ask(text, i % 2 == 0) for i, text in enumerate(texts))))

    alone = [TOKENIZER.decode(rollouts(reference, text)[0].tokens) for text in texts]
    assert asyncio.run(ask_all()) == alone


# ---- streams


@pytest.mark.parametrize("stop", [None, "midst"])
def test_a_stream_joined_is_the_answer_that_is_none(client: openai.OpenAI, reference: Any, stop: str | None) -> None:
    text = TOKENIZER.decode(rollouts(reference, "hello")[0].tokens)
    fields: dict[str, Any] = {"model": MODEL, "prompt": "hello", "seed": 5, "n": 3, "logprobs": 0}
    if stop:
        fields["stop"] = [from_the_midst(text), "never"]
    whole = client.completions.create(**fields)
    texts, values, offsets, reasons = [""] * 3, [[], [], []], [[], [], []], [""] * 3
    usage = None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage
        for choice in chunk.choices:
            assert not reasons[choice.index]
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                values[choice.index] += choice.logprobs.token_logprobs or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    logprobs = [choice.logprobs for choice in whole.choices]
    assert values == [entry.token_logprobs for entry in logprobs if entry]
    assert offsets == [entry.text_offset for entry in logprobs if entry]
    assert usage == whole.usage


def test_a_streamed_chat_joined_is_the_answer_that_is_none(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**fields)
    deltas = [c for chunk in client.chat.completions.create(stream=True, **fields) for c in chunk.choices]
    for choice in whole.choices:
        mine = [piece for piece in deltas if piece.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_a_stream_of_several_prompts_keeps_them_apart(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": ["hello", "a"], "seed": 5, "n": 2}
    whole = client.completions.create(**fields)
    texts = [""] * 4
    for chunk in client.completions.create(stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.slow
def test_a_stream_comes_in_pieces(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="hello", logit_bias={"65": 100}, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == "A" * 24
    assert len(pieces) >= 24 // 4  # a piece for each dispatch of four steps


def test_a_stream_is_server_sent_events(served: Running) -> None:
    body = {"model": MODEL, "prompt": "hello", "stream": True, "max_tokens": 2}
    status, text, headers = served.post("/v1/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert {json.loads(event[6:])["object"] for event in events[:-1]} == {"text_completion"}


# ---- ends


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_goes_ends_its_generation(served: Running, stream: bool) -> None:
    before = metric(served, "axl_requests_total", endpoint="completions", status="499")
    aborted = served.engine.stats()["aborted"]
    served.server.engine.pause().result(10)
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    body = json.dumps({"model": MODEL, "prompt": "hello", "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert eventually(lambda: metric(served, "axl_requests_waiting") == 1)
    connection.close()
    assert eventually(lambda: metric(served, "axl_requests_waiting") == 0)
    assert metric(served, "axl_requests_total", endpoint="completions", status="499") == before + 1
    served.server.engine.resume().result(10)
    assert eventually(lambda: not served.engine.busy)
    assert served.engine.stats()["aborted"] == aborted + 1


@pytest.fixture(scope="module")
def patient() -> Iterator[Running]:
    """A server whose completions are long enough for something to happen in their midst."""
    with running(make_engine(max_new_tokens=LONG)) as served:
        yield served


@pytest.mark.slow
def test_a_client_that_goes_in_the_midst_of_a_stream_ends_its_generation(patient: Running) -> None:
    stream = patient.client().completions.create(model=MODEL, prompt="hello", logit_bias={"65": 100}, stream=True, n=4)
    assert next(iter(stream)).choices[0].text.startswith("A")
    stream.close()
    assert eventually(lambda: metric(patient, "axl_requests_total", endpoint="completions", status="499") == 1)
    assert eventually(lambda: not patient.engine.busy)
    assert patient.engine.stats()["aborted"] == 1
    assert patient.engine.stats()["generation_tokens"] < 4 * LONG


@pytest.mark.slow
def test_an_error_in_the_midst_of_a_stream_reaches_the_client(patient: Running) -> None:
    stream = patient.client().completions.create(model=MODEL, prompt="hello", logit_bias={"65": 100}, stream=True)
    next(iter(stream))
    patient.server.engine.abort_all(ApiError(503, "it is over"))
    with pytest.raises(openai.APIError, match="it is over"):
        list(stream)
    assert eventually(lambda: not patient.engine.busy)


def test_a_deadline_is_answered_with_what_there_is(served: Running) -> None:
    body = {"model": MODEL, "prompt": "hello", "deadline": 1e-6, "n": 2}
    status, answer, _ = served.post("/v1/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (504, "deadline", "timeout_error")
    assert len(answer["error"]["partial"]) == 2
    _, text, _ = served.post("/v1/completions", {**body, "stream": True})
    assert '"code":"deadline"' in text.split("\n\n")[-3]


def test_a_step_that_fails_is_an_error_of_its_requests_and_the_server_goes_on() -> None:
    with running(make_engine(weights=False)) as served:  # it cannot make a step
        for _ in range(3):
            status, answer, _ = served.post("/v1/completions", {"model": MODEL, "prompt": "hello"})
            assert (status, answer["error"]["code"]) == (500, "engine_failed")
            assert served.ask("GET", "/health")[:2] == (200, {"status": "ok", "model": MODEL, "version": -1})
        served.server.engine.set_weights(make_params(0), 1).result(10)
        assert served.post("/v1/completions", {"model": MODEL, "prompt": "hello"})[0] == 200


def test_an_engine_that_cannot_go_on_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(make_engine(weights=False)) as served:
        monkeypatch.setattr(served.engine.runner.cache, "_cache_shape", None)  # its pages cannot be allocated again
        assert served.post("/v1/completions", {"model": MODEL, "prompt": "hello"})[0] == 500
        assert served.post("/v1/completions", {"model": MODEL, "prompt": "hello"})[0] == 503
        assert served.ask("GET", "/health")[0] == 503
        assert not served.server.alive


@pytest.mark.slow
def test_figures_count_what_was_done() -> None:
    with running() as fresh:
        answer = fresh.client().completions.create(model=MODEL, prompt="hello", n=2)
        with pytest.raises(openai.BadRequestError):
            fresh.client().completions.create(model=MODEL, prompt="hello", n=0)
        assert answer.usage is not None
        assert metric(fresh, "axl_requests_total", endpoint="completions", status="200") == 1
        assert metric(fresh, "axl_requests_total", endpoint="completions", status="400") == 1
        assert metric(fresh, "axl_generated_tokens_total") == answer.usage.completion_tokens
        assert metric(fresh, "axl_prompt_tokens_total") == 6
        assert metric(fresh, "axl_time_to_first_token_seconds_count") == 1
        assert metric(fresh, "axl_requests_waiting") == metric(fresh, "axl_requests_running") == 0


@pytest.mark.slow
def test_the_sampler_of_the_engine_is_the_default() -> None:
    with running(make_engine(sampler=Sampler.Config(temperature=0.0))) as greedy:
        create = greedy.client().completions.create
        assert len({create(model=MODEL, prompt="hello").choices[0].text for _ in range(3)}) == 1


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_smaller_routes_of_vllm(served: Running) -> None:
    status, found, _ = served.post("/tokenize", {"model": MODEL, "prompt": "hello"})
    assert status == 200 and found["count"] == len(found["tokens"]) == 6
    assert served.post("/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "hello"}
    assert served.post("/tokenize", {"prompt": 1})[0] == 400 and served.post("/detokenize", {})[0] == 400
    assert served.ask("GET", "/ping")[0] == served.ask("GET", "/version")[0] == 200
    same = [served.post("/v1/completions", {"model": MODEL, "prompt": "hi", "seed": s})[1] for s in (7, 7 + 2**32)]
    assert same[0]["choices"] == same[1]["choices"]


@pytest.mark.slow
def test_an_expression_of_the_models_tokenizer_that_does_not_end_fails_its_request_alone(tmp_path: Path) -> None:
    """The library panics, which is no exception of Python's own kind."""
    path = str(
        hostile_tokenizers.write(tmp_path, pre_tokenizer=hostile_tokenizers.split(hostile_tokenizers.EXPRESSION))
    )
    with running(make_engine(), tokenizer=HuggingFaceTokenizer.Config(path=path).build()) as server:
        for where, body in (("completions", {"max_tokens": 2}), ("tokenize", {})):
            address = f"/v1/{where}" if where == "completions" else f"/{where}"
            status, answer, _ = server.post(address, {"model": MODEL, "prompt": hostile_tokenizers.TEXT, **body})
            assert status == 400 and "a regular expression of it takes too long" in str(answer), answer
        assert server.post("/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 2})[0] == 200
