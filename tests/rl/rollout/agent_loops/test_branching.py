"""Samples that share their first tokens: each is drawn by its own keys, whatever else happens."""

import dataclasses

import numpy as np
import pytest

from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from tests.rl.rollout.small import STOP, TEMPERATURE, assert_same, drain, make_engine, params, scores
from tests.rl.tiny import make_prompt, tiny_experiment

PROMPT = make_prompt(3, 21)
WHOLE, SHORT = StopConditions(), StopConditions(tokens=STOP)
TREE = Branching.Config(at=(4, 9), ways=2).build()
SAMPLES = 8  # two roots


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine()


def branched(engine: RolloutEngine, stop: StopConditions = WHOLE) -> tuple[Rollout, ...]:
    asked = dataclasses.replace(TREE.request(PROMPT, SAMPLES, 11), stop=stop)
    number = engine.submit(asked)
    return drain(engine)[number].rollouts


def parent(sample: int, completions: int) -> int:
    """Return the sample that this one split off from, in a tree of two ways whose level had so many completions."""
    return sample if sample < completions else sample - completions


def cut(rollout: Rollout, sample: int, count: int) -> Rollout:
    arrays = {name: getattr(rollout, name)[:count] for name in ("tokens", "logprobs", "versions", "action_mask")}
    return dataclasses.replace(rollout, sample_id=sample, finish_reason="abort", **arrays)


@pytest.mark.slow
def test_samples_share_their_branches_and_continue_each_by_its_own_draws(engine: RolloutEngine):
    rollouts = branched(engine)
    assert [rollout.sample_id for rollout in rollouts] == list(range(SAMPLES))
    roots = engine.generate([Request(PROMPT, 2, 11, stop=WHOLE)])
    inner: list[Rollout] = []
    for sample in range(4):
        root = roots[parent(sample, 2)]
        begun = cut(root, sample, 4)
        inner += [root] if sample < 2 else engine.generate([Request(PROMPT, 1, 11, stop=WHOLE, partial=(begun,))])
    expected: list[Rollout] = []
    for sample in range(SAMPLES):
        branch = inner[parent(sample, 4)]
        begun = cut(branch, sample, 9)
        expected += [branch] if sample < 4 else engine.generate([Request(PROMPT, 1, 11, stop=WHOLE, partial=(begun,))])
    assert_same(rollouts, expected)
    assert len({rollout.tokens.tobytes() for rollout in rollouts}) == SAMPLES
    for rollout, scored in zip(rollouts, scores(params(), [(PROMPT, r) for r in rollouts], TEMPERATURE), strict=True):
        np.testing.assert_array_equal(rollout.logprobs, scored)


@pytest.mark.slow
def test_what_is_shared_is_drawn_once():
    engine = make_engine()
    length = {len(rollout.tokens) for rollout in branched(engine)}.pop()
    assert engine.stats()["generation_tokens"] == 2 * 4 + 4 * 5 + 8 * (length - 9)


@pytest.mark.slow
def test_a_branch_that_ends_before_it_splits_is_the_whole_of_its_samples(engine: RolloutEngine):
    rollouts = branched(engine, SHORT)
    by_root = {root: [r for r in rollouts if parent(parent(r.sample_id, 4), 2) == root] for root in range(2)}
    ended = {root: len(of[0].tokens) for root, of in by_root.items() if len(of[0].tokens) < 4}
    for root in ended:
        assert {r.tokens.tobytes() for r in by_root[root]} == {by_root[root][0].tokens.tobytes()}
    assert [r.sample_id for r in rollouts] == list(range(SAMPLES))
    assert all(r.finish_reason == "stop" and r.tokens[-1] in STOP for r in rollouts if len(r.tokens) < 24)
    assert any(len(r.tokens) < 9 for r in rollouts), "a prompt whose branches end late shows nothing"


@pytest.mark.slow
def test_an_aborted_group_is_the_same_once_it_is_drawn_again_or_continued(engine: RolloutEngine):
    expected = branched(engine)
    continued = set[bool]()
    for steps in (1, 3, 6):
        number = engine.submit(dataclasses.replace(TREE.request(PROMPT, SAMPLES, 11), stop=WHOLE))
        for _ in range(steps):
            engine.step()
        (output,) = (one for one in engine.abort_all() if one.number == number)
        kept = TREE.continuable(output.rollouts, SAMPLES)
        continued.add(bool(kept))
        again = dataclasses.replace(TREE.request(PROMPT, SAMPLES, 11, partial=kept), stop=WHOLE)
        assert_same(engine.generate([again]), expected)
    assert continued == {False, True}


@pytest.mark.full
def test_the_same_with_few_pages(engine: RolloutEngine):
    small = make_engine(pages=12)
    assert_same(branched(small), branched(engine))
    assert small.stats()["preemptions"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"branching": Branching.Config()}, "branching.at is REQUIRED by Branching.Config and not set"),
        ({"branching": Branching.Config(at=())}, "branching.at: expected ascending"),
        ({"branching": Branching.Config(at=(3, 3))}, "ascending"),
        ({"branching": Branching.Config(at=(2,), ways=1)}, "branching.ways"),
        ({"branching": Branching.Config(at=(10**6,))}, "less than max_new_tokens"),
        (
            {"branching": Branching.Config(at=(2,), ways=4), "samples_per_prompt": 4},
            "samples_per_prompt: .* multiple of 4 .* 8 or more",
        ),
    ],
)
def test_trees_that_cannot_be_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        tiny_experiment(**{"samples_per_prompt": 16, **changes}).check()
