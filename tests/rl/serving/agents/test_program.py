"""Agents in processes of their own, by the official client, on a real engine: what is trained on is what was drawn."""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import reach
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from rl.audit.invariants import check_run
from rl.environments.environment import Environment
from rl.environments.scoring import NoScorer, score_rollouts
from rl.protocol.messages import Prompt, Rollout, Score
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.agents.program import AgentProgram
from rl.tasks.encoding import encode_problem
from rl.verification.inline import InlineVerifier
from tests.axlearn_like.tokenizers.golden_files import FOLDER
from tests.bounds import within
from tests.rl.environments.toys import tasks
from tests.rl.rollout.small import assert_no_page_is_held, drain
from tests.rl.runtime.ray.experiments import metrics, run_here
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_policy

TOKENIZER = HuggingFaceTokenizer.Config(
    path=str(FOLDER / "byte_level"), chat_template=str(FOLDER / "templates" / "qwen25.jinja")
)
tokenizer = TOKENIZER.build()
POLICY = tiny_policy(tokenizer.vocab_size)
AGENT = str(Path(__file__).with_name("agent.py"))


def agent(way: str, **changes: Any) -> AgentProgram.Config:
    return AgentProgram.Config(command=(sys.executable, AGENT, way), **changes)


@pytest.fixture(scope="module")
def one_engine() -> RolloutEngine:
    cfg = RolloutEngine.Config(
        model=POLICY,
        stop_tokens=tokenizer.stop_ids,
        max_prompt_tokens=64,
        max_new_tokens=600,
        sampler=Sampler.Config(),
        max_num_seqs=4,
        page_size=16,
        steps_per_dispatch=4,
        prefill_tokens=128,
    )
    engine = cfg.build(decode=partial(completion_text, tokenizer))
    engine.set_weights(tiny_params(POLICY), 5)
    return engine


@pytest.fixture
def engine(one_engine: RolloutEngine) -> Iterator[RolloutEngine]:
    yield one_engine
    drain(one_engine)
    assert_no_page_is_held(one_engine)


def play(engine: RolloutEngine, environment: Environment.Config, samples: int = 2) -> tuple[Any, list[Rollout]]:
    """Return the problem and the rollouts of its episodes."""
    mixture = tasks(environment).build()
    episodes = Episodes(mixture, tokenizer, seed=3)
    problem = mixture.train(0)
    prompt = Prompt(problem.id, problem.family, encode_problem(problem, tokenizer))
    number = engine.submit(episodes.request(prompt, samples, 7))
    found = episodes.recorded(drain(engine, 60_000)[number].rollouts, again=False)
    episodes.close()
    return prompt, found


def scored(engine: RolloutEngine, prompt: Prompt, rollout: Rollout) -> np.ndarray:
    """Return the engine's own log-probabilities of all tokens behind the prompt, by one pass over them."""
    whole = np.concatenate([prompt.tokens, rollout.tokens])
    old, engine.cfg.max_prompt_tokens = engine.cfg.max_prompt_tokens, 400
    try:
        stop = StopConditions(max_new_tokens=0)
        number = engine.submit(Request(Prompt(0, "scored", whole), stop=stop, prompt_scores=True))
        scores = drain(engine)[number].prompt_scores
    finally:
        engine.cfg.max_prompt_tokens = old
    assert scores is not None
    return scores.logprobs[len(prompt.tokens) - 1 :]


class Judge:
    def score(self, problem_ids: Any, answers: Any, details: Any = None) -> list[Score]:
        return [Score(float(len(answer))) for answer in answers]


@pytest.mark.full
@pytest.mark.numerics
def test_several_turns_are_one_rollout_of_the_tokens_that_were_drawn(engine: RolloutEngine):
    prompt, rollouts = play(engine, agent("two"))
    assert len(prompt.tokens) == 1
    for rollout in rollouts:
        episode = rollout.episode
        assert episode is not None and (episode.ended, episode.error) == ("done", "")
        assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 0.5]
        assert dict(episode.figures) == {"requests": 3.0, "same": 1.0, "rerun": 0.0}
        drawn = np.flatnonzero(rollout.action_mask)
        assert 3 <= len(drawn) <= 9 and np.all(rollout.versions[drawn] == 5)
        np.testing.assert_allclose(rollout.logprobs[drawn], scored(engine, prompt, rollout)[drawn], atol=2e-4)
        assert np.all(rollout.logprobs[~rollout.action_mask] == 0)
        said = completion_text(tokenizer, [*prompt.tokens.tolist(), *rollout.tokens.tolist()])
        assert "You are terse." in said and said.index("q") < said.index("Sure?") < said.index("Really?")
    _, scores = score_rollouts(Judge(), rollouts, tokenizer)
    assert [score.reward for score in scores] == [0.5, 0.5]


@pytest.mark.slow
def test_the_first_request_is_exactly_what_the_chat_template_writes(engine: RolloutEngine):
    prompt, (rollout,) = play(engine, agent("one"), samples=1)
    first = int(np.argmax(rollout.action_mask))
    template = tokenizer.chat_template
    assert template is not None
    text = template.render(
        [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "q0"}],
        add_generation_prompt=True,
    )
    assert [*prompt.tokens, *rollout.tokens[:first]] == tokenizer.encode(text, special=True)
    assert rollout.episode is not None and "length" in dict(rollout.episode.figures)


@pytest.mark.slow
def test_the_verifier_judges_the_last_answer_if_the_agent_gives_no_reward(engine: RolloutEngine):
    _, rollouts = play(engine, agent("verified", verify=True), samples=1)
    answers, (score,) = score_rollouts(Judge(), rollouts, tokenizer)
    assert score.reward == len(answers[0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("silent", "RuntimeError: the agent ended with status 1 and asked nothing; its last words: nothing to say"),
        ("rewrites", "message 1 is another than in the last request; expected the conversation so far"),
        ("changes the answer", "message 2 is not the answer that the policy gave; expected"),
        ("two at once", "n: got 2; expected an integer from 1 to 1"),
        ("forgets its tokens", "the prompt does not begin with the tokens of the episode so far"),
        ("bad reward", "HTTP Error 400"),
        ("fails", "KeyError: 'lost'"),
        ("verified", "expected a reward at AXL_REWARD_URL, or verify=True"),
    ],
)
def test_what_an_agent_does_wrong_is_an_episode_without_reward(engine: RolloutEngine, way: str, error: str):
    _, (rollout,) = play(engine, agent(way), samples=1)
    episode = rollout.episode
    assert episode is not None and episode.ended == "error" and error in episode.error, episode


@pytest.mark.slow
def test_an_agent_that_hangs_is_killed_at_the_deadline(engine: RolloutEngine):
    began = time.monotonic()
    _, (rollout,) = play(engine, agent("hangs", deadline_s=5.0), samples=1)
    assert time.monotonic() - began < 20
    assert rollout.episode is not None and rollout.episode.error == "TimeoutError: not done after 5 s"
    for _ in range(100):
        if not running("hangs"):
            break
        time.sleep(0.05)
    assert not running("hangs")


@pytest.mark.slow
def test_a_long_chat_is_truncated(engine: RolloutEngine):
    _, (rollout,) = play(engine, agent("two", max_turns=2), samples=1)
    assert rollout.episode is not None and rollout.episode.ended == "truncated" and len(rollout.episode.turns) == 2


def test_the_program_of_a_text_needs_consent():
    assert list(reach(AgentProgram.Config(command=("python", "mine.py"), variables=("KEY",)))) == [
        "KEY@run:python mine.py"
    ]


def running(way: str) -> bool:
    """Return True if a process of this machine is the agent."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().split(b"\0")[1:3] == [AGENT.encode(), way.encode()]:
                return True
        except OSError:
            continue
    return False


@pytest.mark.numerics
@pytest.mark.full
def test_a_policy_learns_from_an_agent_that_speaks_openai_alone(tmp_path: Path):
    """The reward of the agent's own making rises, and the trainer's log-probabilities are those that were captured."""
    cfg = tiny_experiment(
        policy=POLICY,
        tokenizer=TOKENIZER,
        tasks=tasks(agent("one")),
        verifier=InlineVerifier.Config(scorer=NoScorer.Config()),
        max_prompt_tokens=8,
        max_new_tokens=64,
        num_steps=12,
        prompts_per_step=2,
        samples_per_prompt=4,
        groups_per_lease=2,
        evaluation=None,
    )
    cfg.learner.schedule.set(lr=3e-2)
    rows = metrics(run_here(tmp_path, cfg))
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    for row in rows:
        assert within(row["logprob_diff_max"], 1e-5)
        assert row["episode/turns"] == 1 and row["episode/failures"] == 0
    assert not any(finding.broken for finding in check_run(tmp_path))
