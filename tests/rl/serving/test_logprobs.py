"""Log-probabilities, with alternatives and of prompts, by the official client: against numpy over the logits."""

from typing import Any

import numpy as np
import openai
import pytest

from axlearn_like.tokenizers.protocol import completion_text
from tests.rl.serving.reference import TOLERANCE, logprobs_of
from tests.rl.serving.running import MODEL, QUESTION, TOKENIZER, as_prompt

PROMPTS = ["hello", "what is 2+2?"]
RULES: dict[str, Any] = {"temperature": 0.6, "presence_penalty": 1.0, "logit_bias": {"5": 3}, "seed": 7}

pytestmark = [pytest.mark.numerics, pytest.mark.slow]


def word(token: int) -> str:
    return completion_text(TOKENIZER, [token])


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def assert_alternatives(found: dict[str, float], expected: np.ndarray, token: int, count: int) -> None:
    """Compare {word: logprob} of a place with the likeliest tokens, and the one that was drawn."""
    best = np.argsort(-expected, kind="stable")[:count].tolist()
    by_word: dict[str, float] = {}
    for one in [*best, token]:
        by_word.setdefault(word(one), float(expected[one]))
    assert found.keys() == by_word.keys()
    close([found[name] for name in by_word], list(by_word.values()))


def test_alternatives_of_completions_are_the_models(client: openai.OpenAI) -> None:
    """Several prompts and samples under rules, which change what is drawn and not what the model thinks."""
    options: dict[str, Any] = {"n": 2, "max_tokens": 9, **RULES}
    extra = {"return_token_ids": True}
    answer = client.completions.create(model=MODEL, prompt=PROMPTS, logprobs=3, extra_body=extra, **options)
    plain = client.completions.create(model=MODEL, prompt=PROMPTS, extra_body=extra, **options)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in plain.choices]
    for index, choice in enumerate(answer.choices):
        prompt, ids = as_prompt(PROMPTS[index // 2]).tokens.tolist(), choice.model_extra["token_ids"]  # pyright: ignore
        expected, logprobs = logprobs_of([*prompt, *ids])[len(prompt) - 1 :], choice.logprobs
        assert logprobs is not None and logprobs.top_logprobs is not None
        assert logprobs.tokens == list(map(word, ids))
        close(logprobs.token_logprobs, [row[token] for row, token in zip(expected, ids, strict=True)])
        for found, row, token in zip(logprobs.top_logprobs, expected, ids, strict=True):
            assert_alternatives(found, row, token, 3)


def test_alternatives_of_chats_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    options |= {"logprobs": True, "top_logprobs": 20, "extra_body": {"return_token_ids": True}}
    (whole,) = client.chat.completions.create(**options).choices
    chunks = [chunk for chunk in client.chat.completions.create(**options, stream=True) if chunk.choices]
    streamed = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content or ()]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert [one.model_dump() for one in streamed] == [one.model_dump() for one in whole.logprobs.content]
    prompt, ids = as_prompt("2+2?\n").tokens.tolist(), whole.model_extra["token_ids"]  # pyright: ignore
    expected = logprobs_of([*prompt, *ids])[len(prompt) - 1 :]
    for entry, row, token in zip(whole.logprobs.content, expected, ids, strict=True):
        best = np.argsort(-row, kind="stable")[:20]
        assert token == best[0], "greedy"
        close(entry.logprob, row[token])
        close([one.logprob for one in entry.top_logprobs], row[best])
        assert [bytes(one.bytes or ()) for one in entry.top_logprobs] == [TOKENIZER.token_bytes(int(b)) for b in best]


def test_words_as_ids_and_the_distribution_drawn_from(client: openai.OpenAI) -> None:
    extra = {"logprobs_mode": "processed_logprobs", "return_tokens_as_token_ids": True, "top_k": 2}
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.5, "seed": 3}
    answer = client.completions.create(model=MODEL, prompt="hello", logprobs=5, extra_body=extra, **options)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs and logprobs.token_logprobs
    ids = [int(name.removeprefix("token_id:")) for name in logprobs.tokens]
    prompt = as_prompt("hello").tokens.tolist()
    for row, found in zip(logprobs_of([*prompt, *ids])[len(prompt) - 1 :], logprobs.top_logprobs, strict=True):
        best = np.argsort(-row, kind="stable")[:2]
        assert list(found) == [f"token_id:{one}" for one in best]
        shares = np.exp(row[best] / 0.5)
        close(np.exp(list(found.values())), shares / shares.sum())
    raw = client.completions.create(
        model=MODEL, prompt="hello", logprobs=0, extra_body={"logprobs_mode": "raw_logprobs", "top_k": 2}, **options
    )
    assert raw.choices[0].logprobs is not None
    expected = logprobs_of([*prompt, *ids])[len(prompt) - 1 :]
    close(raw.choices[0].logprobs.token_logprobs, [row[token] for row, token in zip(expected, ids, strict=True)])


def test_an_echo_with_its_logprobs_generates_or_only_scores(client: openai.OpenAI) -> None:
    for length in (6, 0):
        extra = {"return_token_ids": True}
        options: dict[str, Any] = {"max_tokens": length, "logprobs": 2, "n": 2, "echo": True, "seed": 1}
        answer = client.completions.create(model=MODEL, prompt=PROMPTS, extra_body=extra, **options)
        assert answer.usage is not None and answer.usage.completion_tokens <= 4 * length
        for index, choice in enumerate(answer.choices):
            text = PROMPTS[index // 2]
            ids = choice.model_extra["token_ids"]  # pyright: ignore[reportOptionalSubscript]
            whole = [*as_prompt(text).tokens.tolist(), *ids]
            assert choice.text == text + TOKENIZER.decode(ids) and len(ids) <= length
            logprobs = choice.logprobs
            assert logprobs is not None and logprobs.top_logprobs and logprobs.token_logprobs and logprobs.text_offset
            assert logprobs.tokens == list(map(word, whole))
            assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
            expected = logprobs_of(whole)
            close(logprobs.token_logprobs[1:], [row[token] for row, token in zip(expected, whole[1:], strict=True)])
            for found, row, token in zip(logprobs.top_logprobs[1:], expected, whole[1:], strict=True):
                assert_alternatives(found, row, token, 2)
            assert logprobs.text_offset[: len(text) + 1] == [0, *range(len(text))]
            assert length == 0 or logprobs.text_offset[len(text) + 1] == len(text)
            assert logprobs.text_offset == sorted(logprobs.text_offset)
            assert choice.finish_reason == "length" or length


def test_an_echo_as_a_stream_begins_with_the_prompt(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model=MODEL, prompt=PROMPTS, echo=True, stream=True, seed=1, max_tokens=5)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    whole = client.completions.create(model=MODEL, prompt=PROMPTS, echo=True, seed=1, max_tokens=5)
    assert texts == [choice.text for choice in whole.choices]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, PROMPTS, strict=True))


@pytest.mark.parametrize("alternatives", [0, 3])
def test_logprobs_of_prompts_as_vllm_writes_them(client: openai.OpenAI, alternatives: int) -> None:
    """The prompt is in the prefix cache by now, and the answer is that of a request without them."""
    extra = {"prompt_logprobs": alternatives}
    answer = client.completions.create(model=MODEL, prompt="hello", seed=5, extra_body=extra)
    assert answer.choices[0].text == client.completions.create(model=MODEL, prompt="hello", seed=5).choices[0].text
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, extra_body=extra)
    for found, text in ((answer.choices[0].model_extra, "hello"), (chat.model_extra, "2+2?\n")):
        tokens = as_prompt(text).tokens.tolist()
        assert found is not None and len(found["prompt_logprobs"]) == len(tokens)
        first, *others = found["prompt_logprobs"]
        assert first is None
        for place, row, token in zip(others, logprobs_of(tokens), tokens[1:], strict=True):
            order = np.argsort(-row, kind="stable").tolist()
            named = [*order[:alternatives], *([] if token in order[:alternatives] else [token])]
            assert list(place) == [str(one) for one in named]
            for one, entry in zip(named, place.values(), strict=True):
                close(entry["logprob"], row[one])
                assert entry["rank"] == 1 + order.index(one) and entry["decoded_token"] == word(one)
