"""Loops of the shape that the client's cookbook has: a loss falls, a reward rises, tenants learn side by side."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import tinker
from tinker import types

from axlearn_like.tokenizers.protocol import completion_text
from tests.rl.serving.service.real import BASE, TOKENIZER, real_service
from tests.rl.serving.service.wire.running import KEYS, Running

pytestmark = [pytest.mark.numerics, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with real_service(tmp_path_factory.mktemp("state")) as served:
        yield served


def as_row(prompt: list[int], answer: list[int], **inputs: list[float]) -> types.Datum:
    """Return the datum of a prompt and an answer; `inputs` are values of the answer's tokens, 0 before them."""
    tokens = prompt + answer
    padding = [0.0] * (len(prompt) - 1)
    given: Any = {"target_tokens": tokens[1:], **{name: padding + values for name, values in inputs.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def learn(model: tinker.TrainingClient, steps: int) -> list[float]:
    """Teach an answer by cross-entropy; returns the mean loss of a token before each step."""
    tokenizer = TOKENIZER.build()
    answer = [*tokenizer.encode("4"), tokenizer.eos]
    row = as_row([tokenizer.bos, *tokenizer.encode("2+2?")], answer, weights=[1.0] * len(answer))
    losses: list[float] = []
    for _ in range(steps):
        passed = model.forward_backward([row], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=2e-2))
        losses.append(passed.result().metrics["loss:sum"] / len(answer))
        stepped.result()
    return losses


def test_a_loss_falls_and_samplers_have_what_was_learned(served: Running):
    client = served.client()
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    losses = learn(model, 25)
    assert losses[0] > 4
    assert losses[-1] < losses[0] / 3
    sampler = model.save_weights_and_get_sampling_client().result()
    tokenizer = TOKENIZER.build()
    prompt = [tokenizer.bos, *tokenizer.encode("2+2?")]
    greedy = types.SamplingParams(max_tokens=5, temperature=0)
    drawn = sampler.sample(types.ModelInput.from_ints(prompt), 1, greedy).result().sequences[0]

    # The sampler scores as the trainer does, and far from the base.
    tokens = prompt + tokenizer.encode("4")
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    row = as_row(tokens[:1], tokens[1:], weights=[1.0] * (len(tokens) - 1))
    trained = model.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose([one or 0.0 for one in scored[1:]], trained, atol=1e-4)
    base = client.create_sampling_client(base_model=BASE).result()
    assert (base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[-1] or 0.0) < trained[-1] - 2

    # OpenAI's client draws from the same adapter.
    path = model.save_weights_for_sampler("taught").result().path
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS["alice"], max_retries=0) as other:
        said = other.completions.create(model=path, prompt=prompt, max_tokens=5, temperature=0)
    assert said.choices[0].text == completion_text(tokenizer, list(drawn.tokens))


@pytest.mark.full
def test_a_reward_rises_by_importance_sampling_with_advantages_of_groups(served: Running):
    model = served.client().create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    tokenizer = TOKENIZER.build()
    prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in ("a", "b", "c", "d")]
    rewards: list[float] = []
    for step in range(12):
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, seed=step)
        groups = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
        rows: list[types.Datum] = []
        for prompt, group in zip(prompts, groups, strict=True):
            drawn = group.result().sequences
            scores = np.asarray([_reward(list(one.tokens)) for one in drawn])
            rewards.append(float(scores.mean()))
            for one, advantage in zip(drawn, scores - scores.mean(), strict=True):
                tokens, logprobs = list(one.tokens), list(one.logprobs or [])
                advantages = [float(advantage)] * len(tokens)
                rows.append(as_row(prompt, tokens, logprobs=logprobs, advantages=advantages))
        passed = model.forward_backward(rows, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        # Unchanged weights drew and score them: all ratios are 1.
        first = passed.result().loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompts[0]) - 1 :]
        np.testing.assert_allclose(
            first, rows[0].loss_fn_inputs["logprobs"].to_numpy()[len(prompts[0]) - 1 :], atol=1e-4
        )
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.2


def _reward(tokens: list[int]) -> float:
    """Return the share of tokens with even ids: dense, and easy to raise."""
    return float(np.mean([token % 2 == 0 for token in tokens])) if tokens else 0.0


def test_tenants_side_by_side_learn_to_the_bit_as_alone(served: Running):
    alone = learn(_model(served, "alice"), 3)
    with ThreadPoolExecutor(2) as together:
        first = together.submit(learn, _model(served, "alice"), 3)
        second = together.submit(learn, _model(served, "bob"), 3)
        assert first.result() == second.result() == alone


def _model(served: Running, tenant: str) -> tinker.TrainingClient:
    return served.client(tenant).create_lora_training_client(base_model=BASE, rank=2, seed=7).result()


def test_a_wrong_input_of_a_loss_is_named_and_the_model_goes_on(served: Running):
    model = _model(served, "bob")
    row = as_row([1, 2], [3, 4], weights=[1.0, 1.0])
    with pytest.raises(tinker.RequestFailedError, match="datum 0: ppo needs logprobs"):
        model.forward_backward([row], "ppo").result()
    nan = as_row([1, 2], [3, 4], weights=[float("nan"), 1.0])
    with pytest.raises(tinker.RequestFailedError) as failed:
        model.forward_backward([nan], "cross_entropy").result()
    assert failed.value.category.value == "user"
    assert len(learn(model, 1)) == 1
