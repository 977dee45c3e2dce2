"""Penalties, least lengths and ends of a text through the server, against numpy over the model's logits."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from tests.rl.serving.reference import log_softmax, logits_of
from tests.rl.serving.running import MODEL, TOKENIZER, as_prompt

pytestmark = pytest.mark.slow

NAMES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# Small ones: the logits of the model are near each other.
PENALTIES = [(0.3, 0.0, 1.0), (0.0, 0.15, 1.0), (-0.3, -0.1, 1.0), (0.4, 0.1, 1.2), (0.0, 0.0, 1.3), (0.0, 0.0, 1.0)]


def complete(client: openai.OpenAI, prompt: str = "hello", **fields: Any) -> tuple[str, list[int], Any]:
    """Return text, tokens and the choice of a completion; fields that OpenAI does not have are sent too."""
    fields = {"return_token_ids": True, **fields}
    known = {name: fields.pop(name) for name in ("seed", "max_tokens", "stop", "logprobs") if name in fields}
    (choice,) = client.completions.create(model=MODEL, prompt=prompt, **known, extra_body=fields).choices
    return choice.text, choice.model_extra["token_ids"], choice  # pyright: ignore[reportOptionalSubscript]


def penalised(logits: np.ndarray, prompt: list[int], drawn: list[int], amounts: tuple[float, ...]) -> np.ndarray:
    presence, frequency, repetition = amounts
    times = np.bincount(drawn, minlength=len(logits))
    factor = np.where(logits > 0, logits / repetition, logits * repetition)
    logits = np.where((np.bincount(prompt, minlength=len(logits)) + times) > 0, factor, logits)
    return logits - presence * (times > 0) - frequency * times


@pytest.mark.numerics
def test_penalties_are_vllms_in_any_company(client: openai.OpenAI) -> None:
    """Every token is the likeliest after the penalties on those before it, and its log-probability is theirs."""

    def ask(amounts: tuple[float, ...]) -> tuple[str, list[int], Any]:
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": 20}
        return complete(client, **options, **dict(zip(NAMES, amounts, strict=True)))

    alone = [ask(amounts)[1] for amounts in PENALTIES]
    with ThreadPoolExecutor(len(PENALTIES)) as pool:
        together = [ids for _, ids, _ in pool.map(ask, PENALTIES)]
    assert together == alone and len({tuple(ids) for ids in alone}) > 2
    prompt = as_prompt("hello").tokens.tolist()
    for amounts, ids in zip(PENALTIES, alone, strict=True):
        logits = logits_of([*prompt, *ids])[len(prompt) - 1 : -1]
        for at, token in enumerate(ids):
            row = penalised(logits[at], prompt, ids[:at], amounts)
            assert row[token] > row.max() - 1e-4, (amounts, at)


@pytest.mark.numerics
def test_logprobs_of_penalised_draws_are_of_the_distribution_drawn_from(client: openai.OpenAI) -> None:
    amounts, prompt = (1.5, 0.5, 1.3), as_prompt("hello").tokens.tolist()
    _, ids, choice = complete(client, logprobs=0, seed=4, temperature=0.7, **dict(zip(NAMES, amounts, strict=True)))
    logits = logits_of([*prompt, *ids])[len(prompt) - 1 : -1]
    rows = [log_softmax(penalised(row, prompt, ids[:at], amounts) / 0.7) for at, row in enumerate(logits)]
    expected = [row[token] for row, token in zip(rows, ids, strict=True)]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected, rtol=0, atol=5e-5)


def test_least_lengths_hold_back_stop_tokens_and_strings(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20, "stop_token_ids": list(range(0, 256, 16))}
    ends = set(options["stop_token_ids"])
    for seed in range(12):
        _, ids, _ = complete(client, seed=seed, min_tokens=8, **options)
        assert len(ids) > 8 and not ends & set(ids[:8]) and TOKENIZER.eos not in ids[:8]
    letters = {str(ord("a")): 5}  # often enough
    options = {"seed": 1, "ignore_eos": True, "max_tokens": 20, "logit_bias": letters}
    text, *_ = complete(client, **options)
    early = "a"
    assert text.count(early) > 1
    cut, ids, choice = complete(client, **options, stop=[early])
    assert cut == text[: text.index(early)] and choice.finish_reason == "stop"
    for least in range(1, 20):
        held, ids, _ = complete(client, **options, stop=[early], min_tokens=least)
        before = len(TOKENIZER.decode(ids[:least]).rstrip("\ufffd"))
        at = text.find(early, before)
        assert held == (text if at < 0 else text[:at])


def test_an_end_is_part_of_the_text_if_it_is_to_be_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    text, ids, _ = complete(client, seed=1, ignore_eos=True, max_tokens=20)
    at = next(i for i in range(2, len(text) - 2) if text[i : i + 2].isascii() and text.count(text[i : i + 2]) == 1)
    stop = text[at : at + 2]
    token = next(one for one in ids if TOKENIZER.token_bytes(one).isascii() and TOKENIZER.token_bytes(one))
    cases: list[tuple[dict[str, Any], str, str | None]] = [({"stop": [stop]}, text[: at + 2], text[:at])]
    cases.append(({"stop_token_ids": [token]}, TOKENIZER.decode(ids[: ids.index(token) + 1]), None))
    for fields, included, excluded in cases:
        options: dict[str, Any] = {"seed": 1, "ignore_eos": True, "max_tokens": 20, **fields}
        assert complete(client, include_stop_str_in_output=True, **options)[0] == included
        without, drawn, _ = complete(client, **options)
        assert without == (TOKENIZER.decode(drawn[:-1]) if excluded is None else excluded)
        extra = {"ignore_eos": True, "include_stop_str_in_output": True, **fields}
        stops = extra.pop("stop", None)
        chunks = client.completions.create(
            model=MODEL, prompt="hello", seed=1, max_tokens=20, stop=stops, stream=True, extra_body=extra
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == included


def test_every_chunk_has_the_usage_if_it_is_to(client: openai.OpenAI) -> None:
    options: Any = {"continuous_usage_stats": True}
    chunks = list(client.completions.create(model=MODEL, prompt="hello", seed=5, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks) > 2 and counts == sorted(counts) and 0 < counts[0] < counts[-1]
    whole = client.completions.create(model=MODEL, prompt="hello", seed=5)
    assert whole.usage is not None and chunks[-1].usage == whole.usage and not chunks[-1].choices
