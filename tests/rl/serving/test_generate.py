"""`/inference/v1/generate`: ids in, ids and log-probabilities out, as the clients of vLLM's endpoint read them."""

import math
from typing import Any

import openai
import pytest

from tests.rl.serving.running import MODEL, TOKENIZER, Running, as_prompt

PROMPT = as_prompt("2+2?").tokens.tolist()
URL = "/inference/v1/generate"


def body(**sampling: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 9, "seed": 5, "logprobs": 1, "skip_special_tokens": False, **sampling}
    return {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_p": 0.9}, {"n": 3}, {"logprobs": 4}])
def test_the_tokens_are_a_completions_with_their_log_probabilities(
    served: Running, client: openai.OpenAI, sampling: dict[str, Any]
):
    status, answer, _ = served.post(URL, body(**sampling))
    extra: dict[str, Any] = {"return_token_ids": True}
    sampling = {name: value for name, value in sampling.items() if name != "logprobs"}
    same = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=9, seed=5, logprobs=0, extra_body=extra, **sampling
    )
    assert status == 200 and len(answer["choices"]) == len(same.choices) and answer["request_id"]
    for choice, other in zip(answer["choices"], same.choices, strict=True):
        content = choice["logprobs"]["content"]
        assert choice["token_ids"] == other.model_extra["token_ids"]  # pyright: ignore[reportOptionalSubscript]
        assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert other.logprobs is not None
        assert [one["logprob"] for one in content] == pytest.approx(other.logprobs.token_logprobs, abs=1e-5)
        assert all(math.isfinite(one["logprob"]) for one in content)
        assert choice["finish_reason"] == other.finish_reason
    assert same.usage is not None and answer["usage"]["prompt_tokens"] == same.usage.prompt_tokens == len(PROMPT)


@pytest.mark.slow
def test_alternatives_are_there_if_more_than_the_token_is_asked_for(served: Running):
    content = served.post(URL, body(logprobs=4))[1]["choices"][0]["logprobs"]["content"]
    for one in content:
        tops = {top["token"]: top["logprob"] for top in one["top_logprobs"]}
        assert 4 <= len(tops) <= 5 and tops[one["token"]] == pytest.approx(one["logprob"], abs=1e-5)
    assert all(one["top_logprobs"] == [] for one in served.post(URL, body())[1]["choices"][0]["logprobs"]["content"])


@pytest.mark.slow
def test_a_stop_token_ends_the_answer_and_is_one_of_its_tokens(served: Running):
    whole = served.post(URL, body())[1]["choices"][0]["token_ids"]
    cut = served.post(URL, body(stop_token_ids=[whole[3]]))[1]["choices"][0]
    assert cut["token_ids"] == whole[: whole.index(whole[3]) + 1] and cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": None}, "token_ids: missing; expected an array of token ids"),
        ({"token_ids": [[1], [2]]}, "token_ids: expected an array of token ids, of one prompt"),
        ({"token_ids": [TOKENIZER.vocab_size]}, f"token_ids: got {TOKENIZER.vocab_size}; expected token ids"),
        ({"token_ids": [1] * 1000}, "token_ids: 1000 tokens; this server takes 1 to"),
        ({"sampling_params": {"temperatur": 1}}, "unknown field 'temperatur'; did you mean 'temperature'?"),
        ({"sampling_params": 3}, "sampling_params is a number; expected an object"),
        ({"stream": True}, "stream: not supported by this server"),
        ({"features": {"mm": 1}}, "features: not supported by this server"),
        ({"tokens": [1]}, "unknown field 'tokens'"),
    ],
)
def test_what_is_wrong_is_named(served: Running, change: dict[str, Any], said: str):
    status, answer, _ = served.post(URL, {**body(), **change})
    assert status == 400 and answer["error"]["message"].startswith(said), answer
