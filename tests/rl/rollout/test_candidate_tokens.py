"""Truncated distributions whose candidates are recorded: what the engine writes down, and scoring by it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.base import bind, build_abstract, split
from mesh import UserError, make_mesh
from rl.protocol.messages import Rollout
from rl.rollout.decoding.drawing import draw, keep_most
from rl.rollout.decoding.records import CompletionRecords
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.sampling import RecordedSampler, Sampler
from rl.rollout.speculation.speculator import Speculation
from rl.training.columns import CandidateTokens, sequence_places
from rl.training.logprobs import fill_rows, row_length, score_rows
from tests.rl.tiny import make_prompt, make_rollout, tiny_experiment, tiny_params, tiny_policy

MAX_PROMPT, MAX_NEW, MOST = 12, 8, 6
SAMPLER = RecordedSampler.Config(temperature=0.8, top_p=0.7, min_p=0.1, most=MOST)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    cfg = RolloutEngine.Config(
        model=tiny_policy(), stop_tokens=(1,), max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
    )
    engine = cfg.set(max_num_seqs=8, steps_per_dispatch=3, sampler=SAMPLER).build()
    engine.set_weights(tiny_params(tiny_policy(), scale=6.0), 0)
    return engine


def scored(rows: dict[str, np.ndarray], candidate_tokens: np.ndarray | None, params: Any) -> np.ndarray:
    policy = tiny_policy()
    graphdef, _ = split(build_abstract(policy))
    with jax.set_mesh(make_mesh()):
        score = jax.jit(lambda p, t, y, h, s: score_rows(bind(graphdef, p), t, y, h, candidate_tokens=s))
        kept = None if candidate_tokens is None else jnp.asarray(candidate_tokens)
        found = score(params, rows["tokens"], rows["targets"], jnp.full(1, SAMPLER.temperature), kept)
    return found.logprobs()


@pytest.mark.slow
def test_a_plain_scoring_pass_over_the_record_gives_the_engines_log_probabilities_to_the_bit(engine: RolloutEngine):
    """Rollouts that were aborted and went on are among them; without the record every token would be less likely."""
    asked = [Request(make_prompt(n, 3 + 2 * n), samples=3, seed=1) for n in range(4)]
    numbers = {engine.submit(request): request for request in asked}
    finished = [one for _ in range(2) for one in engine.step()] + engine.abort_all()
    again = [dataclasses.replace(numbers[one.number], partial=one.rollouts) for one in finished]
    rollouts = engine.generate(again)
    prompts = {request.prompt.id: request.prompt.tokens for request in asked}
    pairs = [(prompts[r.prompt_id], r) for r in rollouts]
    length = row_length(MAX_PROMPT, MAX_NEW)
    rows = fill_rows([(prompt, r.tokens) for prompt, r in pairs], len(pairs), length)
    record = CandidateTokens(MOST).fill(sequence_places(pairs, len(pairs), length))
    params = tiny_params(tiny_policy(), scale=6.0)
    exact, whole = scored(rows, record, params), scored(rows, None, params)
    sizes: list[int] = []
    for row, (prompt, r) in enumerate(pairs):
        part = slice(len(prompt) - 1, len(prompt) - 1 + len(r.tokens))
        np.testing.assert_array_equal(exact[row, part], r.logprobs)
        assert (record := r.candidate_tokens) is not None and (len(record), record.dtype) == (len(r.tokens), np.uint16)
        kept = [set(ids[ids != 65535].tolist()) for ids in record]
        assert all(token in ids for token, ids in zip(r.tokens.tolist(), kept, strict=True))
        alone = [len(ids) == 1 for ids in kept]
        assert (whole[row, part] <= r.logprobs + 1e-6).all() and (r.logprobs[alone] == 0).all()
        sizes += map(len, kept)
    assert 1 <= min(sizes) < max(sizes) == MOST
    lost = [whole[row, len(p) - 1] - r.logprobs[0] for row, (p, r) in enumerate(pairs)]
    assert min(lost) < -0.05, "a mutation: the whole distribution is another one"


@pytest.mark.slow
def test_of_equals_those_of_smaller_ids_stay_and_fewer_are_marked():
    logits = jnp.asarray([[0.0, 2.0, 2.0, 2.0, -1e30], [1.0, -1e30, -1e30, -1e30, -1e30]])
    limited, kept = keep_most(logits, 2)
    assert kept.tolist() == [[1, 2], [0, -1]]
    assert (np.asarray(limited) > -1e29).tolist() == [[False, True, True, False, False], [True] + [False] * 4]
    assert keep_most(logits, 7)[1].shape == (2, 7)  # more than there are words
    broken = jnp.full((1, 5), jnp.nan)
    assert np.isnan(draw(jax.random.split(jax.random.key(0), 1), keep_most(broken, 2)[0])[1].logprobs()).all()


def test_a_record_holds_what_was_drawn_given_and_cut():
    record = CompletionRecords()
    assert record.fields()["candidate_tokens"] is None
    record.drawn([-1.0, -2.0], 3, np.array([[5, 9, -1], [7, -1, -1]]))
    record.given(2, 3)
    fork = record.copy()
    record.drawn([-0.5], 4, np.array([[1, 2, 3]]))
    found = record.fields()["candidate_tokens"]
    none = 65535
    assert found is not None
    assert found.tolist() == [[5, 9, none], [7, none, none], [none] * 3, [none] * 3, [1, 2, 3]]
    assert found.dtype == np.uint16 and found.nbytes == 5 * 3 * 2
    fork.cut(1)
    tokens = np.arange(5, dtype=np.int32)
    rollout = Rollout(prompt_id=0, sample_id=0, tokens=tokens, finish_reason="stop", **record.fields())
    cut, again = (one.fields()["candidate_tokens"] for one in (fork, CompletionRecords.of(rollout)))
    assert cut is not None and cut.tolist() == [[5, 9]]
    assert again is not None and again.tolist() == found.tolist()
    record.drawn([-0.5], 4, np.array([[70_000]]))
    large = record.fields()["candidate_tokens"]
    assert large is not None and large.dtype == np.uint32


def test_what_cannot_be_replayed_is_refused():
    for field, value in {"temperature": 0.0, "top_k": 7, "repetition_penalty": 1.1, "logit_bias": ((1, 2.0),)}.items():
        with pytest.raises(ConfigError, match=field):
            SAMPLER.clone(**{field: value}).check()
    cfg = RolloutEngine.Config(
        model=tiny_policy(), stop_tokens=(), max_prompt_tokens=4, max_new_tokens=4, sampler=SAMPLER
    )
    with pytest.raises(UserError, match="speculation: expected None with a RecordedSampler"):
        cfg.clone(speculation=Speculation.Config()).check()
    drawn = make_rollout(make_prompt(0), 0, [1, 2])
    with pytest.raises(UserError, match="no record of the tokens that it was drawn from; expected up to 6"):
        CandidateTokens(MOST).fill(sequence_places([(make_prompt(0).tokens, drawn)], 1, 16))
    half = dataclasses.replace(drawn, candidate_tokens=np.zeros((1, 2), np.uint16))
    with pytest.raises(UserError, match="a record of 2, for 1 of 2, of the tokens"):
        CandidateTokens(MOST).fill(sequence_places([(make_prompt(0).tokens, half)], 1, 16))
    assert Sampler.Config(top_p=0.5) != RecordedSampler.Config(top_p=0.5)


def test_a_record_of_more_tokens_than_there_are_is_refused():
    cfg = RolloutEngine.Config(
        model=tiny_policy(), stop_tokens=(1,), max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
    )
    with pytest.raises(ConfigError, match=r"^RolloutEngine\.sampler\.most: expected at most 272, .*got 273"):
        cfg.set(sampler=SAMPLER.clone(most=273)).build()
    run = tiny_experiment(sampler=SAMPLER.clone(most=100_000))
    with pytest.raises(ConfigError, match=r"sampler\.most: expected at most policy\.vocab_size=\d+, got 100000"):
        run.check("inprocess")
