"""Episodes on the engine: tokens, masks and rewards; what environments do wrong; what is lost and played again."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.tokenizers.protocol import answer_text, completion_text
from rl.environments.environment import Environment
from rl.environments.scoring import score_rollouts
from rl.evaluation.evaluator import transcript
from rl.protocol.messages import Prompt, PullStats, Rollout, Score
from rl.rollout.agent_loops.episodes import RERUN, Episodes
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerFeatures, WorkerPolicy, WorkerServices
from rl.tasks.encoding import encode_problem
from rl.verification.failures import ScorerFails
from tests.rl.controller.scripted import make
from tests.rl.environments.toys import TOKENIZER, Broken, Echo, Forever, Slow, closed, tasks
from tests.rl.rollout.small import assert_no_page_is_held, assert_same, drain
from tests.rl.tiny import tiny_params, tiny_policy

pytestmark = pytest.mark.slow

POLICY = tiny_policy(TOKENIZER.vocab_size)
MAX_NEW = 40


@pytest.fixture(scope="module")
def one_engine() -> RolloutEngine:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "page_size": 8, "steps_per_dispatch": 4, "prefill_tokens": 64}
    cfg = RolloutEngine.Config(
        model=POLICY,
        stop_tokens=(TOKENIZER.eos,),
        max_prompt_tokens=8,
        max_new_tokens=MAX_NEW,
        sampler=Sampler.Config(),
        **sizes,
    )
    engine = cfg.build(decode=partial(completion_text, TOKENIZER))
    engine.set_weights(tiny_params(POLICY), 5)
    return engine


@pytest.fixture
def engine(one_engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """Whatever a test does, in the end the engine is empty and holds no page."""
    closed.clear()
    yield one_engine
    drain(one_engine)
    assert_no_page_is_held(one_engine)


class Play:
    """The episodes of an environment on an engine."""

    def __init__(self, engine: RolloutEngine, environment: Environment.Config):
        self.engine, self.tasks = engine, tasks(environment).build()
        self.episodes = Episodes(self.tasks, TOKENIZER, seed=3)

    def submit(self, index: int, samples: int = 2, partial: Sequence[Rollout] = ()) -> int:
        problem = self.tasks.train(index)
        prompt = Prompt(problem.id, problem.family, encode_problem(problem, TOKENIZER))
        return self.engine.submit(self.episodes.request(prompt, samples, 7, partial=partial))

    def __call__(self, *indices: int, samples: int = 2) -> list[Rollout]:
        numbers = [self.submit(index, samples) for index in indices]
        finished = drain(self.engine)
        found = [rollout for number in numbers for rollout in finished[number].rollouts]
        recorded = self.episodes.recorded(found, again=False)
        self.episodes.close()
        return recorded


class Judge:
    """Verifier that gives each answer its length, and keeps what it was asked."""

    def __init__(self):
        self.asked: list[str] = []

    def score(self, problem_ids: Sequence[int], answers: Sequence[str], details: Any = None) -> list[Score]:
        self.asked += answers
        return [Score(float(len(answer))) for answer in answers]


def text(tokens: np.ndarray) -> str:
    return completion_text(TOKENIZER, tokens.tolist())


def test_the_policys_tokens_are_actions_and_observations_are_given(engine: RolloutEngine):
    play = Play(engine, Echo.Config(verify=True))
    rollouts = play(0, 1)
    judge = Judge()
    answers, scores = score_rollouts(judge, rollouts, TOKENIZER)
    for rollout, answer, score in zip(rollouts, answers, scores, strict=True):
        episode, question = rollout.episode, play.tasks.problem(rollout.prompt_id).question
        assert episode is not None and (episode.ended, len(episode.turns)) == ("done", 3)
        first = 0
        given = np.ones(len(rollout.tokens), bool)
        for number, turn in enumerate(episode.turns):
            said = f"{question}!" if number == 0 else f"<{len(action)}>"  # noqa: F821
            start = first + len(said)
            assert text(rollout.tokens[first:start]) == said
            given[start : turn.end] = False
            action = answer_text(TOKENIZER, rollout.tokens[start : turn.end].tolist())
            first = turn.end
        assert first == len(rollout.tokens) and rollout.finish_reason == "stop"
        np.testing.assert_array_equal(rollout.action_mask, ~given)
        assert np.all(rollout.logprobs[given] == 0) and np.all(rollout.logprobs[~given] < 0)
        assert answer == action and score.reward == len(answer) + 1.5
        shown = transcript(rollout, TOKENIZER, play.tasks.problem(rollout.prompt_id))
        assert [one["by"] for one in shown["turns"]] == ["environment", "policy"] * 3
        assert shown["turns"][0]["text"] == f"{question}!" and shown["turns"][-1]["text"] == answer
        assert (shown["ended"], shown["turn_rewards"]) == ("done", [0.5] * 3)
    assert judge.asked == answers
    assert sorted(closed) == sorted(rollout.prompt_id for rollout in rollouts)


def test_an_episode_is_the_same_in_any_company_and_again_after_it_was_lost(engine: RolloutEngine):
    play = Play(engine, Slow.Config())
    alone = play(1)
    together = [one for one in play(0, 1, 2, 3) if one.prompt_id == alone[0].prompt_id]
    assert_same(together, alone)
    assert [one.episode for one in together] == [one.episode for one in alone]

    number = play.submit(1)
    while engine.stats()["suspended"] == 0:
        engine.step()
    (lost,) = [one for one in engine.abort_all() if one.number == number]
    partial = play.episodes.continuable(play.episodes.recorded(lost.rollouts, again=False))
    assert [len(one.tokens) for one in partial] == [0, 0]  # their environments are gone
    whole = dataclasses.replace(alone[0])  # one was over when its worker left
    number = play.submit(1, partial=(whole, partial[1]))
    again = play.episodes.recorded(drain(engine)[number].rollouts, (whole, partial[1]), again=True)
    assert_same(again, alone)
    assert [one.episode for one in again] == [one.episode for one in alone]


def test_a_repetition_in_an_environment_that_is_not_pure_is_tagged(engine: RolloutEngine):
    play = Play(engine, Echo.Config(pure=False))
    first = play(0)
    number = play.submit(0, partial=(first[0], play.episodes.continuable([_cut(first[1])])[0]))
    found = play.episodes.recorded(drain(engine)[number].rollouts, [first[0], _cut(first[1])], again=True)
    assert [one.tags for one in found] == [(), (RERUN,)]
    assert [dict(one.episode.figures)["rerun"] for one in found if one.episode] == [0.0, 1.0]


class Held:
    """Weights that are on the engine's device already."""

    def __init__(self, engine: RolloutEngine):
        self._placed = engine.place(tiny_params(POLICY))

    def take(self, version: int, timeout: float) -> tuple[Any, PullStats]:
        return self._placed, PullStats()


def played(engine: RolloutEngine, environment: Environment.Config, *, leaves: bool) -> list[Rollout]:
    """Return the episodes of a step; if one `leaves`, it is asked to when the first of its episodes waits."""
    sizes: dict[str, Any] = {
        "prompts_per_step": 2,
        "groups_per_lease": 2,
        "samples_per_prompt": 2,
        "max_prompt_tokens": 8,
    }
    controller = make(tasks=tasks(environment), **sizes)
    controller.begin(0, 0)
    asked: list[bool] = []

    def waits() -> bool:
        if engine.stats()["suspended"]:
            asked.append(True)
        return bool(asked)

    done = lambda: controller.next_batch(0) is not None  # noqa: E731
    for number, stop in enumerate([waits, done] if leaves else [done]):
        engine.invalidate_weights()
        held: Any = Held(engine)
        services = WorkerServices(controller, held, Judge(), EventLog("", silent=True))
        features = WorkerFeatures(episodes=Episodes.of(tasks(environment), TOKENIZER, seed=3))
        RolloutWorker(f"w{number}", engine, {"": WorkerPolicy(TOKENIZER, 3, services, features)}).run(stop)
    batch = controller.next_batch(0)
    assert batch is not None
    return [rollout for group in batch for rollout in group.rollouts]


@pytest.mark.parametrize("pure", [True, False])
def test_an_episode_whose_worker_must_leave_begins_again(engine: RolloutEngine, pure: bool):
    """The next worker plays the same one, and tags it where its first beginning may have had effects."""
    environment = Slow.Config(pure=pure)
    undisturbed, again = played(engine, environment, leaves=False), played(engine, environment, leaves=True)
    assert_same([dataclasses.replace(one, tags=()) for one in again], undisturbed)
    assert {one.tags for one in undisturbed} == {()}
    assert {one.tags for one in again} == {() if pure else (RERUN,)}


def _cut(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, finish_reason="abort")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("reset", "OSError: no such world"),
        ("raises", "KeyError: 'lost'"),
        ("exits", "RuntimeError: what was waited for ended with SystemExit(3)"),
        ("hangs", "TimeoutError: not done after 0.1 s"),
        ("blocks", "TimeoutError: not done after 0.35 s"),
        ("nan", "NotAReward: step returned nan; expected a finite number"),
        ("text", "NotAReward: step returned str '1.0'; expected a finite number"),
        ("pair", "TypeError: step returned tuple ('', 1.0); expected (observation, reward, done)"),
        ("bytes", "TypeError: observation bytes b'seen'; expected text"),
    ],
)
def test_what_an_environment_does_wrong_is_no_reward_and_no_stall(how: str, error: str, engine: RolloutEngine):
    Broken.released.clear()
    play = Play(engine, Broken.Config(how=how, verify=True))
    number, began = play.submit(0), time.monotonic()
    rollouts = play.episodes.recorded(drain(engine)[number].rollouts, again=False)
    assert time.monotonic() - began < 5
    Broken.released.set()
    play.episodes.close()
    for rollout in rollouts:
        assert rollout.episode is not None and rollout.episode.ended == "error" and len(rollout.tokens)
        assert rollout.episode.error == error and rollout.finish_reason == "stop"
    _, scores = score_rollouts(Judge(), rollouts, TOKENIZER)
    assert [(one.reward, one.status, one.error) for one in scores] == [(0.0, "error", f"environment: {error}")] * 2
    assert sorted(closed) == sorted(-1 if how == "reset" else one.prompt_id for one in rollouts)


def test_an_episode_that_never_ends_is_truncated_and_not_judged(engine: RolloutEngine):
    judge = Judge()
    every: list[dict[str, Any]] = [{"max_turns": 2}, {"max_turns": 50}, {"max_turns": 50, "max_turn_tokens": None}]
    for limits in every:
        rollouts = Play(engine, Forever.Config(verify=True, **limits))(0)
        for rollout in rollouts:
            assert rollout.episode is not None and rollout.episode.ended == "truncated"
            assert rollout.finish_reason == "length" and len(rollout.tokens) <= MAX_NEW
            assert limits["max_turns"] == 50 or len(rollout.episode.turns) == 2
        _, scores = score_rollouts(judge, rollouts, TOKENIZER)
        assert [one.reward for one in scores] == [sum(t.reward for t in r.episode.turns) for r in rollouts if r.episode]
    assert judge.asked == []


def test_environments_are_closed_when_their_requests_end_early(engine: RolloutEngine):
    play = Play(engine, Slow.Config())
    play.submit(0)
    play.submit(1)
    while engine.stats()["suspended"] < 2:
        engine.step()
    assert closed == []
    engine.abort_all()
    play.episodes.close()
    assert len(closed) == 4


def test_an_environment_that_only_fails_ends_the_run(engine: RolloutEngine):
    play = Play(engine, Broken.Config(how="reset"))
    play.episodes._failures._stop_after = 4
    play(0)
    with pytest.raises(ScorerFails, match="the environment failed on each of the last 4 .*no such world"):
        play(1)
