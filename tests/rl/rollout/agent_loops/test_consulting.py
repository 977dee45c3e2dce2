"""Environments that let another policy speak: what it is asked, what the policy sees of it, and what is refused."""

from collections.abc import Iterator
from functools import partial
from typing import Any, override

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.tokenizers.protocol import answer_text, completion_text
from rl.environments.environment import Consult, Environment, Row, Step
from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import RequestOutput
from rl.rollout.scheduling.spawning import MAX_CHILDREN
from rl.tasks.encoding import encode_problem, encode_prompt
from tests.rl.environments.toys import TOKENIZER, tasks
from tests.rl.rollout.small import assert_no_page_is_held, assert_same, drain
from tests.rl.tiny import tiny_params, tiny_policy

pytestmark = pytest.mark.slow

POLICY = tiny_policy(TOKENIZER.vocab_size)
TURNS, ANSWER = 3, 4


class Talk(Environment):
    """Another policy speaks first, and twice between two actions; the policy sees what it says last."""

    class Config(Environment.Config):
        how: str = ""
        max_turn_tokens: int | None = 4
        pure: bool = True
        consults: tuple[str, ...] = ("base",)

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._how, self._left, self._again = cfg.how, TURNS, False

    @override
    def reset(self, row: Any) -> Any:
        return Consult("base", "r?", ANSWER)

    @override
    def step(self, action: str) -> Any:
        self._left, self._again = self._left - 1, True
        match self._how:
            case "other":
                return Consult("nobody", "?")
            case "number":
                return Consult("base", 3)  # pyright: ignore[reportArgumentType]
            case "long":
                return Consult("base", "x" * 64)
            case "nan":
                return Consult("base", "s", reward=float("nan"))
            case _:
                return Consult("base", f"s{self._left}", ANSWER, reward=0.25)

    @override
    def hear(self, answer: str) -> Any:
        if self._how == "ever" or self._again:
            self._again = False
            return Consult("base", "again", ANSWER, reward=0.5 if self._how != "ever" else 0.0)
        if self._how == "early":
            return "", 1.0, True
        return f"<{answer}>", 1.0 if self._left < TURNS else 0.0, self._left == 0


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "page_size": 8, "steps_per_dispatch": 4, "prefill_tokens": 64}
    cfg = RolloutEngine.Config(
        model=POLICY, stop_tokens=(TOKENIZER.eos,), max_prompt_tokens=16, max_new_tokens=80, **sizes
    )
    built = cfg.build(decode=partial(completion_text, TOKENIZER))
    built.set_weights(tiny_params(POLICY), 5)
    yield built
    assert_no_page_is_held(built)


def play(
    engine: RolloutEngine, how: str = "", samples: int = 1, environment: Environment.Config | None = None
) -> tuple[RequestOutput, list[Any], Prompt]:
    made = tasks(environment or Talk.Config(how=how)).build()
    episodes, problem = Episodes(made, TOKENIZER, seed=3), made.train(0)
    prompt = Prompt(problem.id, problem.family, encode_problem(problem, TOKENIZER))
    number = engine.submit(episodes.request(prompt, samples, 7))
    output = drain(engine)[number]
    found = episodes.recorded(output.rollouts, again=False)
    episodes.close()
    return output, found, prompt


def test_what_others_say_is_given_and_paid_for_as_the_environment_says(engine: RolloutEngine) -> None:
    output, (rollout,), _ = play(engine)
    asked = ["r?", *(text for left in range(TURNS - 1, -1, -1) for text in (f"s{left}", "again"))]
    assert [prompt.tolist() for prompt, _ in output.spawned] == [encode_prompt(q, TOKENIZER).tolist() for q in asked]
    said = [answer_text(TOKENIZER, one.tokens.tolist()) for _, one in output.spawned]
    assert all(0 < len(one.tokens) <= ANSWER for _, one in output.spawned) and len(set(said)) > 1
    shown = [f"<{said[place]}>" for place in (0, 2, 4)]
    first, given = 0, np.ones(len(rollout.tokens), bool)
    for text, turn in zip(shown, rollout.episode.turns, strict=True):
        start = first + len(TOKENIZER.encode(text))
        assert completion_text(TOKENIZER, rollout.tokens[first:start].tolist()) == text
        given[start : turn.end] = False
        first = turn.end
    np.testing.assert_array_equal(rollout.action_mask, ~given)
    assert [turn.reward for turn in rollout.episode.turns] == [1.75] * TURNS and rollout.episode.ended == "done"


def test_samples_consult_apart_and_a_lost_one_again_to_the_bit(engine: RolloutEngine) -> None:
    alone, (first,), _ = play(engine)
    both, found, _ = play(engine, samples=2)
    assert_same(found[:1], [first])
    assert_same([one for _, one in both.spawned[: len(alone.spawned)]], [one for _, one in alone.spawned])
    assert found[0].tokens.tobytes() != found[1].tokens.tobytes()


class Council(Environment):
    """The policy answers once, and then several times side by side; what the second of those says is the answer."""

    class Config(Environment.Config):
        max_turn_tokens: int | None = 4
        pure: bool = True
        verify: bool = True

    @override
    def reset(self, row: Any) -> str:
        return ""

    @override
    def step(self, action: str) -> Any:
        return Consult(None, "again?", ANSWER, samples=3)

    @override
    def hear(self, answer: list[str]) -> Any:
        return Step(done=True, answer=answer[1])


def test_several_answers_are_drawn_side_by_side_and_the_environment_says_what_is_judged(engine: RolloutEngine) -> None:
    output, (rollout,), _ = play(engine, environment=Council.Config())
    assert {prompt.tobytes() for prompt, _ in output.spawned} == {encode_prompt("again?", TOKENIZER).tobytes()}
    said = [answer_text(TOKENIZER, one.tokens.tolist()) for _, one in output.spawned]
    assert len(set(said)) == 3 and rollout.episode.answer == said[1] and rollout.episode.ended == "done"
    own = answer_text(TOKENIZER, rollout.tokens.tolist())
    assert rollout.action_mask.all() and own != said[1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("other", "consulted 'nobody'; its `consults` are: 'base'"),
        ("number", "of a Consult; expected text"),
        ("long", "max_prompt_tokens"),
        ("nan", "Consult"),
        ("ever", f"more than {MAX_CHILDREN} completions"),
        ("early", "before the first action"),
    ],
)
def test_what_cannot_be_asked_ends_the_episode_as_an_error(engine: RolloutEngine, how: str, says: str) -> None:
    _, (rollout,), _ = play(engine, how)
    assert rollout.episode.ended == "error" and says in rollout.episode.error


@pytest.mark.parametrize("wrong", ["ann", "ann@x", "base@3", ""])
def test_policies_that_learn_cannot_be_consulted(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"consults: expected frozen policies, each as 'NAME@-4'"):
        Talk.Config(consults=("base", wrong)).check_fields()


def test_an_environment_that_cannot_hear_consults_nobody() -> None:
    class Deaf(Environment):
        class Config(Environment.Config):
            pass

        @override
        def reset(self, row: Row) -> str:
            return ""

        @override
        def step(self, action: str) -> Any:
            return "", 0.0, True

    Deaf.Config().check_fields()
    with pytest.raises(ConfigError, match=r"consults: expected \(\) without a method `hear`"):
        Deaf.Config(consults=("base",)).check_fields()
