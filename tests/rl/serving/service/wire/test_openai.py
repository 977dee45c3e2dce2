"""OpenAI's official client against the wire: the same adapters, by their paths; a tenant's own alone."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from rl.serving.service.messages import AdamParams, CreateModel, Datum, LoraSpec, SaveState, TrainPass
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.tenants import Tenants
from tests.rl.serving.running import TOKENIZER
from tests.rl.serving.service.wire import numbers
from tests.rl.serving.service.wire.running import KEYS, Running, running_numbers

BASE = dataclasses.replace(numbers.BASE, name="tiny", vocab_size=TOKENIZER.vocab_size)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_numbers(base=BASE, tokenizer=TOKENIZER) as served:
        yield served


@pytest.fixture(scope="module")
def url(served: Running) -> str:
    return f"{served.url}/v1"


def client(url: str, tenant: str = "alice") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEYS[tenant], max_retries=0, timeout=60)


def saved(service: AdapterService, name: str, weight: float) -> str:
    """Save a model whose weight is this; returns the path."""
    session = Tenants({}, service).open_session("alice")
    model, tokens = f"{session}:train:0", np.zeros(1, np.int32)
    row = Datum(tokens, {"target_tokens": tokens, "weights": np.full(1, weight, np.float32)})
    asked = [CreateModel(LoraSpec(1)), TrainPass(model, (row,), "cross_entropy", {}), AdamParams(1.0)]
    for seq, request in enumerate([*asked, SaveState(name, "sampler_weights")]):
        future = service.submit("alice", model, seq, request)
    return future.result(30)["path"]


def test_adapters_are_models_by_their_paths(url: str, served: Running):
    path = saved(served.service, "one", 0.5)
    asked = client(url)
    prompt = TOKENIZER.encode("2+2?")
    for model, logprob in [("tiny", 0.0), (path, 0.5)]:
        answer = asked.completions.create(model=model, prompt=prompt, max_tokens=3, n=2, logprobs=0, seed=1)
        tokens = [(prompt[-1] + 1 + index) % BASE.vocab_size for index in range(3)]
        assert [choice.text for choice in answer.choices] == [TOKENIZER.decode(tokens)] * 2
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs == [logprob] * 3
        assert (answer.model, answer.choices[0].finish_reason) == (model, "length")
        assert answer.usage is not None and answer.usage.completion_tokens == 6
    chat = asked.chat.completions.create(model=path, messages=[{"role": "user", "content": "2+2?"}], max_tokens=2)
    assert chat.choices[0].message.content
    assert path in [one.id for one in asked.models.list().data]
    assert len(served.service.samplers.sessions()) == 1
    assert len(served.service.samplers._open) == 2  # one of the base, one of the path, for all requests


def test_adapters_of_others_are_unknown(url: str, served: Running):
    path = saved(served.service, "secret", 1.0)
    other = client(url, "bob")
    with pytest.raises(openai.NotFoundError, match="no path"):
        other.completions.create(model=path, prompt="2")
    assert path not in [one.id for one in other.models.list().data]
    with pytest.raises(openai.NotFoundError, match="no path"):
        client(url).completions.create(model=path.replace("secret", "never"), prompt="2")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        other.completions.create(model="gpt", prompt="2")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()


def test_streams_are_refused_by_name(url: str):
    with pytest.raises(openai.BadRequestError, match="stream: not supported by this service"):
        client(url).completions.create(model="tiny", prompt="2+2?", max_tokens=3, stream=True)
