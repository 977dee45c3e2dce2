"""Scores of drawn tokens and of prompts, against numpy over the logits of a plain forward pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mesh import UserError
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.decoding.scores import MOST, TokenScores
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, RequestOutput, StopConditions
from rl.rollout.sampling import Sampler
from tests.rl.rollout.small import PENALTIES, STOP, assert_same, drain, make_engine, params, plain_logits, request
from tests.rl.tiny import make_prompt

REQUESTS = [request(number) for number in range(10)]


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine()


def outputs(engine: RolloutEngine, requests: list[Request]) -> list[RequestOutput]:
    numbers = [engine.submit(one) for one in requests]
    finished = drain(engine)
    return [finished[number] for number in numbers]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def assert_scores(scores: TokenScores | None, tokens: np.ndarray, logits: np.ndarray) -> None:
    """Compare the scores of tokens with their definition by numpy."""
    assert scores is not None
    expected = log_softmax(logits)
    chosen = np.take_along_axis(expected, np.asarray(tokens)[:, None], axis=-1)
    np.testing.assert_allclose(scores.logprobs, chosen[:, 0], rtol=0, atol=2e-5)
    best = -np.sort(-expected, axis=-1)[:, :MOST]
    np.testing.assert_allclose(scores.top_logprobs, best, rtol=0, atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, scores.tokens, axis=-1), best, rtol=0, atol=2e-5)
    assert all(len(set(row)) == MOST for row in scores.tokens.tolist())
    surely, perhaps = ((expected > chosen + gap).sum(axis=-1) for gap in (2e-5, -2e-5))
    assert ((scores.ranks > surely) & (scores.ranks <= perhaps + 1)).all()


@pytest.mark.slow
@pytest.mark.numerics
def test_scores_are_those_of_the_model_whatever_the_rules_and_change_nothing(engine: RolloutEngine) -> None:
    rules = [None, Sampler.Config(temperature=0.0), Sampler.Config(temperature=1.7, top_k=3), PENALTIES]
    plain = [dataclasses.replace(one, sampler=rules[i % 4]) for i, one in enumerate(REQUESTS)]
    asked = [dataclasses.replace(one, scores="raw_logprobs" if i % 3 else None) for i, one in enumerate(plain)]
    found = outputs(engine, asked)
    assert_same([r for one in found for r in one.rollouts], engine.generate(plain))
    for one, output in zip(asked, found, strict=True):
        pairs = [(one.prompt, rollout) for rollout in output.rollouts]
        for scores, (_, rollout), logits in zip(output.scores, pairs, plain_logits(params(), pairs), strict=True):
            if one.scores is None:
                assert scores is None
            else:
                assert_scores(scores, rollout.tokens, logits)


@pytest.mark.slow
@pytest.mark.numerics
def test_processed_scores_are_of_the_distribution_drawn_from(engine: RolloutEngine) -> None:
    sampler = Sampler.Config(temperature=0.5, top_k=4)
    for one in outputs(
        engine, [dataclasses.replace(q, scores="processed_logprobs", sampler=sampler) for q in REQUESTS]
    ):
        for scores, rollout in zip(one.scores, one.rollouts, strict=True):
            assert scores is not None and scores.logprobs.tobytes() == rollout.logprobs.tobytes()
            np.testing.assert_allclose(
                np.exp(scores.top_logprobs[:, :4].astype(np.float64)).sum(axis=-1), 1.0, atol=1e-5
            )
            assert (scores.top_logprobs[:, 4:] < -1e20).all() and (scores.ranks <= 4).all()


def prompt_logits(prompt: Prompt) -> np.ndarray:
    """The logits for every token of a prompt but the first."""
    first, rest = Prompt(0, "", prompt.tokens[:1]), prompt.tokens[1:]
    nothing: Any = np.zeros(0, np.int32)
    rollout = Rollout(0, 0, rest, nothing, nothing, nothing, "stop")
    return plain_logits(params(), [(first, rollout)])[0]


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(c, marks=pytest.mark.full)
            for c in ({"pages": 12}, {"steps_per_dispatch": 2, "prefill_tokens": 64})
        ),
    ],
)
def test_prompts_are_scored_whatever_is_cached_or_preempted_and_nothing_else_changes(changes: dict[str, Any]) -> None:
    engine, plain = make_engine(**changes), make_engine(**changes)
    prompts = [request(number, samples=1 + number % 2) for number in range(10)]
    engine.generate(prompts)  # they are cached now
    asked = [dataclasses.replace(one, prompt_scores=number % 3 > 0) for number, one in enumerate(prompts)]
    found = outputs(engine, asked)
    assert_same([r for one in found for r in one.rollouts], plain.generate(prompts))
    for one, output in zip(asked, found, strict=True):
        if one.prompt_scores and len(one.prompt.tokens) > 1:
            assert_scores(output.prompt_scores, one.prompt.tokens[1:], prompt_logits(one.prompt))
        else:
            assert output.prompt_scores is None


@pytest.mark.slow
def test_a_prompt_can_be_scored_alone(engine: RolloutEngine) -> None:
    drawn = engine.stats()["generation_tokens"]
    alone = StopConditions(STOP, max_new_tokens=0)
    asked = [Request(make_prompt(n, n), stop=alone, prompt_scores=True, samples=1 + n % 2) for n in (1, 2, 33, 40)]
    for one, output in zip(asked, outputs(engine, asked), strict=True):
        assert [(len(r.tokens), r.finish_reason) for r in output.rollouts] == [(0, "length")] * one.samples
        assert (0 if output.prompt_scores is None else len(output.prompt_scores)) == len(one.prompt.tokens) - 1
    assert engine.stats()["generation_tokens"] == drawn
    with pytest.raises(UserError, match="asks for 0 new tokens; the engine gives 1 to 24"):
        engine.submit(Request(make_prompt(3, 3), stop=alone))


@pytest.mark.slow
def test_a_stop_token_is_not_drawn_before_the_least_length_and_a_string_does_not_count(engine: RolloutEngine) -> None:
    """The tokens before are those of a request that has no stop tokens, under a distribution without them."""
    least = 9
    for strings in ((), tuple(chr(0x100 + token) for token in range(0, 272, 3))):
        stop = StopConditions(STOP, strings, max_new_tokens=20, min_new_tokens=least)
        rollouts = engine.generate([dataclasses.replace(one, stop=stop) for one in REQUESTS])
        assert not any(np.isin(rollout.tokens[:least], STOP).any() for rollout in rollouts)
        assert all(len(rollout.tokens) > least for rollout in rollouts)
        assert any(len(rollout.tokens) < 20 and rollout.finish_reason == "stop" for rollout in rollouts)
        banned = Sampler.Config(temperature=0.8, logit_bias=tuple((token, -100.0) for token in STOP))
        free = [dataclasses.replace(one, stop=StopConditions(max_new_tokens=least), sampler=banned) for one in REQUESTS]
        assert [r.tokens[:least].tolist() for r in rollouts] == [r.tokens.tolist() for r in engine.generate(free)]
    with pytest.raises(UserError, match="asks for 21 new tokens at least; expected 0 to 20, its most"):
        engine.submit(dataclasses.replace(REQUESTS[0], stop=StopConditions(STOP, max_new_tokens=20, min_new_tokens=21)))
