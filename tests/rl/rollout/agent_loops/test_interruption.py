"""Thinking that takes too long is ended by words that nobody drew; what ends by itself is left alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from tests.rl.rollout.small import TEMPERATURE, assert_same, drain, make_engine, params, scores
from tests.rl.tiny import make_prompt, tiny_experiment

PROMPT, SAMPLES = make_prompt(3, 21), 8
WORDS = "now!"


class Letters:
    """A tokenizer whose every token is a character; the end of thinking is one that is drawn now and then."""

    special_tokens = ()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [ord(character) - 0x100 * (ord(character) >= 0x100) for character in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(0x100 + int(token)) if token >= 128 else chr(int(token)) for token in ids)


def interrupting(until: str = "!", **fields: Any) -> Interruption:
    cfg = Interruption.Config(**{"at": 9, "words": WORDS, "until": until, **fields})
    return cfg.build(tokenizer=Letters())


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine()


def drawn(engine: RolloutEngine, loop: Interruption, **changes: Any) -> tuple[Rollout, ...]:
    number = engine.submit(asked(loop, **changes))
    return drain(engine)[number].rollouts


def asked(loop: Interruption, **changes: Any) -> Request:
    return dataclasses.replace(loop.request(PROMPT, SAMPLES, 11, **changes), stop=StopConditions())


def plain(engine: RolloutEngine) -> list[Rollout]:
    return engine.generate([Request(PROMPT, SAMPLES, 11, stop=StopConditions())])


@pytest.mark.slow
def test_words_follow_the_limit_are_no_actions_and_the_rest_is_drawn_behind_them(engine: RolloutEngine):
    rollouts, words = drawn(engine, interrupting()), [ord(character) for character in WORDS]
    own = [n for n, r in enumerate(plain(engine)) if ord("!") in r.tokens[:9]]
    for n, (rollout, alone) in enumerate(zip(rollouts, plain(engine), strict=True)):
        np.testing.assert_array_equal(rollout.tokens[:9], alone.tokens[:9])
        if n in own:
            np.testing.assert_array_equal(rollout.tokens, alone.tokens)
            continue
        assert rollout.tokens[9 : 9 + len(words)].tolist() == words
        assert np.flatnonzero(~rollout.action_mask).tolist() == list(range(9, 9 + len(words)))
        assert len(rollout.tokens) == len(alone.tokens) == 24  # words count against the limit
    assert len(own) < SAMPLES
    for rollout, scored in zip(rollouts, scores(params(), [(PROMPT, r) for r in rollouts], TEMPERATURE), strict=True):
        np.testing.assert_array_equal(rollout.logprobs[rollout.action_mask], scored[rollout.action_mask])


@pytest.mark.slow
def test_what_has_ended_its_thinking_is_left_alone(engine: RolloutEngine):
    alone = plain(engine)[0]
    character = Letters().decode(alone.tokens[5:6])
    loop = interrupting(until=character, words=f"now{character}", at=20)
    np.testing.assert_array_equal(drawn(engine, loop)[0].tokens, alone.tokens)
    late = interrupting(until=character, words=f"now{character}", at=5)
    assert not drawn(engine, late)[0].action_mask.all()


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_interrupted_rollouts_that_are_handed_back_continue_to_the_bit(steps: int):
    engine, loop = make_engine(steps_per_dispatch=2, max_num_seqs=8), interrupting(spread=3)
    whole = drawn(engine, loop)
    limits = {int(np.flatnonzero(~rollout.action_mask)[0]) for rollout in whole if not rollout.action_mask.all()}
    assert len(limits) > 1 and limits <= {9, 10, 11, 12}  # those of samples differ, from `at` on
    engine.submit(asked(loop))
    for _ in range(2 * steps):
        engine.step()
    (cut,) = engine.abort_all()
    assert any(rollout.finish_reason == "abort" for rollout in cut.rollouts)
    assert_same(drawn(engine, loop, partial=cut.rollouts), whole)


def test_what_leaves_no_answer_or_does_not_end_the_thinking_is_refused():
    with pytest.raises(ConfigError, match=r"words: expected a text with until='!'"):
        interrupting(words="now")
    cfg = Interruption.Config(at=1, words="!!", until="!")
    tiny_experiment(interruption=cfg).check("inprocess")
    with pytest.raises(
        ConfigError, match=r"interruption\.at: expected so that .* 2 tokens of its words .* max_new_tokens=6"
    ):
        tiny_experiment(interruption=cfg.set(at=4)).check("inprocess")
    with pytest.raises(ConfigError, match=r"interruption: expected None with environments or branching"):
        tiny_experiment(samples_per_prompt=8, branching=Branching.Config(at=(2,)), interruption=cfg).check_fields()
