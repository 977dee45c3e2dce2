"""Answers that nobody drew among the rollouts of a group: the same whatever happens to workers, and out of metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.training.alignment.reference import FrozenCopy
from mesh import UserError
from rl.objective import ReferencePenalty
from rl.objective.presets import grpo, luffy
from rl.protocol.headers import header_of
from rl.protocol.messages import Group
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.sampling import RecordedSampler
from rl.training.batching.metrics import batch_metrics
from tests.bounds import within
from tests.rl.rollout.test_worker import CFG, EXPERIMENT, Called, Place, same
from tests.rl.runtime.ray.experiments import assert_same_outcome, metrics, run_here, run_in_parts
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.numerics

TASKS: Any = CFG.tasks
MIXTURE = TASKS.build()
FIRST = MIXTURE.train(0)


PENALISED = luffy(max_length=6).set(old_policy="current", reward_shaping=ReferencePenalty.Config(coef=0.1))


def given(**fields: Any) -> GroupDemonstrations:
    cfg = GroupDemonstrations.Config(max_new_tokens=CFG.max_new_tokens).set(**fields)
    return cfg.build(tasks=MIXTURE, tokenizer=EXPERIMENT.tokenizer)


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixed(**changes: Any) -> Any:
    """The tiny experiment by LUFFY, on the tasks' own answers."""
    objective = luffy(max_length=6).set(old_policy="current")
    return tiny_experiment(**{"objective": objective, "demonstrations": GroupDemonstrations.Config(), **changes})


@pytest.fixture(scope="module")
def stepwise() -> Any:
    return EXPERIMENT.make_engine(steps_per_dispatch=2)


def made(path: Path, engine: Any) -> Place:
    path.mkdir()
    return Place(path, engine)


def worked(place: Place, demonstrations: GroupDemonstrations) -> list[Group]:
    worker = place.worker("w", demonstrations=demonstrations)
    while worker.run_once():
        pass
    return place.batch()


@pytest.mark.slow
def test_the_last_samples_are_the_answers_and_the_others_are_drawn_as_ever(tmp_path: Path, stepwise: Any):
    """Workers that leave with some tokens drawn, at any moment, change nothing."""
    demonstrations = given()
    undisturbed = worked(made(tmp_path / "mixed", stepwise), demonstrations)
    without = made(tmp_path / "drawn", stepwise)
    assert (worker := without.worker("w")).run_once() and worker.run_once()
    for group, drawn in zip(undisturbed, without.batch(), strict=True):
        *own, last = group.rollouts
        assert [rollout.sample_id for rollout in group.rollouts] == list(range(CFG.samples_per_prompt))
        answer = EXPERIMENT.tokenizer.encode(MIXTURE.problem(group.prompt.id).answer)
        if len(answer) < CFG.max_new_tokens:
            assert last.demonstration and last.tokens.tolist() == [*answer, EXPERIMENT.tokenizer.eos]
            assert not last.logprobs.any() and not last.drawn.any()
            assert same([Group(drawn.prompt, tuple(own), group.scores[:-1])], [_less(drawn)])
        else:
            assert not last.demonstration
    marked = [group.rollouts[-1].demonstration for group in undisturbed]
    assert any(marked) and not any(rollout.demonstration for group in undisturbed for rollout in group.rollouts[:-1])
    for patience in (1, 2, 3):
        place = made(tmp_path / f"left{patience}", stepwise)
        place.worker("leaver", demonstrations=demonstrations).run(stop=Called(patience + 2))
        assert same(worked(place, demonstrations), undisturbed)
    # A token that nobody drew counts in no metric of the policy.
    figures = batch_metrics([header_of(group) for group in undisturbed], 1.0)
    rewards = [reward for group in undisturbed for reward in group.drawn_rewards()]
    assert figures["reward"] == pytest.approx(np.mean(rewards)) and len(rewards) == 16 - sum(marked)
    assert figures["demonstrations"] == sum(marked) and figures["demonstration_reward"] == 1.0


def _less(group: Group) -> Group:
    return Group(group.prompt, group.rollouts[:-1], group.scores[:-1])


@pytest.mark.full
def test_a_mixed_run_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path: Path):
    cfg = mixed(staleness=1, evaluation=None)
    whole = run_here(tmp_path / "whole", cfg)
    assert_same_outcome(run_in_parts(tmp_path / "parts", cfg, stop_after=2), whole)
    rows = metrics(whole)
    assert len(rows) == 4 and all(row["demonstrations"] > 0 for row in rows)
    assert all(within([row["logprob_diff_max"], row["scoring_diff_max"]], 4e-6) for row in rows)  # of drawn tokens


def test_demonstrations_of_a_file_by_the_question(tmp_path: Path):
    rows = [{"prompt": FIRST.question, "response": ["one", "two"]}, {"prompt": FIRST.question, "response": "three"}]
    file = written(tmp_path / "a.jsonl", *rows, {"prompt": "another", "response": "much too long"})
    found = [tokens[:-1].tolist() for tokens in given(files=file, per_prompt=3).answers(FIRST)]
    assert found == [EXPERIMENT.tokenizer.encode(text) for text in ("one", "two", "three")]
    assert len(given(files=file).answers(FIRST)) == 1 and given(files=file).answers(MIXTURE.train(1)) == []
    given(files=file).check([MIXTURE.train(1), FIRST])
    with pytest.raises(UserError, match=r"none of the first 1 training problems, such as .*max_new_tokens=6"):
        given(files=file).check([MIXTURE.train(1)])
    with pytest.raises(ConfigError, match=r"b\.jsonl.*expected `prompt`, a text, and `response`.*fields prompt, an"):
        given(files=written(tmp_path / "b.jsonl", {"prompt": "a", "answer": "b"}))
    with pytest.raises(ConfigError, match=r"^\S+\.files: no file matches .*d\.jsonl"):
        given(files=str(tmp_path / "d.jsonl"))


def test_what_cannot_be_mixed_is_refused():
    def refused(cfg: Any, field: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words) as raised:
            cfg.check("inprocess")
        assert raised.value.path.endswith(field)

    mixed().check("inprocess")
    refused(mixed().set(objective=grpo()), "objective.surrogate", r"MixedPolicy.Config\(\), or objective=luffy")
    refused(mixed().set(demonstrations=None), "demonstrations", r"expected GroupDemonstrations\.Config")
    every = mixed()
    every.demonstrations.per_prompt = 4
    refused(every, "per_prompt", "less than samples_per_prompt=4")
    refused(
        mixed(samples_per_prompt=8, branching=Branching.Config(at=(2, 4))), "demonstrations", "None with environments"
    )
    refused(mixed(stop_at_eos=False), "stop_at_eos", "which end so")
    replayed = mixed()
    replayed.trainer.replay_routing = True
    refused(replayed, "trainer.replay_routing", "no routing is recorded")
    cut = RecordedSampler.Config(top_k=4, most=8)
    refused(mixed(sampler=cut), "sampler", "the whole distribution with demonstrations")
    penalised = mixed(objective=PENALISED)
    penalised.trainer.reference = FrozenCopy.Config()
    refused(penalised, "objective.reward_shaping", "one without a reference")
