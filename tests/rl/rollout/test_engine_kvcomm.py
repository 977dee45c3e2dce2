"""Prompts from bases and anchors: what is computed stays the same to the bit, what is reused is tagged and near."""

from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.attention.rope_scaling import DynamicScaling
from mesh import UserError
from rl.protocol.messages import Prompt, Rollout
from rl.protocol.segments import TokenSegment
from rl.rollout.agent_loops.commands import Generate, Join, Observe, Spawn
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.kvcomm.anchors import KVComm
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import Request, StopConditions
from tests.rl.rollout import test_engine_routing
from tests.rl.rollout.small import POLICY, VOCAB, assert_no_page_is_held, assert_same, drain, make_engine, params
from tests.rl.rollout.test_engine_pages import latent
from tests.rl.tiny import tiny_experiment, tiny_params

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

HEAD, NOTES, MIDDLE, SAID, TAIL = 7, 13, 3, 9, 4  # tokens of a template's texts and placeholders
SEGMENTS = (TokenSegment(HEAD), TokenSegment(NOTES, "notes"), TokenSegment(MIDDLE), TokenSegment(SAID, "said"))
SEGMENTS = (*SEGMENTS, TokenSegment(TAIL))
SIZES: dict[str, Any] = {"max_prompt_tokens": 40, "max_num_seqs": 2, "page_size": 8}
EAGER = KVComm.Config(least_anchors=1, least_tokens=8, entropy=1.0, anchors=4)
STOP = StopConditions(max_new_tokens=6)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "latents": {"model": latent("expanded")},
    "latents, absorbed": {"model": latent("absorbed")},
    "from pages": {"decode_from": "pages"},
    "shared keys": {"cascade": 2},
}


def asked(number: int, notes: int = 0, said: int = 0, **fields: Any) -> Request:
    """A request of one template, whose placeholders have the texts of these numbers."""

    def drawn(seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, VOCAB, count)

    fixed = [drawn(1, HEAD), drawn(2, MIDDLE), drawn(3, TAIL)]
    parts = [fixed[0], drawn(100 + notes, NOTES), fixed[1], drawn(200 + said, SAID), fixed[2]]
    prompt = Prompt(number, "agents", np.concatenate(parts).astype(np.int32))
    return Request(prompt, **{"stop": STOP, "segments": SEGMENTS, "seed": 3, **fields})


def engine(kvcomm: KVComm.Config | None, case: str = "plain", **changes: Any) -> RolloutEngine:
    more = SIZES | CASES[case] | changes
    weights = None if "model" not in more else tiny_params(more["model"], 0)
    return make_engine(weights, **{"enable_prefix_caching": False, "kvcomm": kvcomm, **more})


def one(engine: RolloutEngine, request: Request) -> Rollout:
    (rollout,) = engine.generate([request])
    return rollout


@pytest.mark.parametrize("case", CASES)
def test_what_is_computed_has_the_bits_of_an_engine_without(case: str) -> None:
    plain, dense = engine(None, case), engine(EAGER.clone(least_anchors=2, entropy=0.0), case)
    requests = [asked(0), asked(1, 1, 1), asked(2, 2, 2, segments=()), asked(3, 3, 3, samples=2)]
    for request in requests:  # two anchors of the same length are needed, and then the entropy is too high
        assert_same(dense.generate([request]), plain.generate([request]))
    assert dense.stats()["kvcomm_reused_requests"] == 0 and dense.stats()["kvcomm_requests"] == 3
    assert_no_page_is_held(dense)


@pytest.mark.parametrize("case", CASES)
def test_an_anchor_that_is_the_request_itself_gives_back_what_is_computed(case: str) -> None:
    eager = engine(EAGER, case)
    first, second = one(eager, asked(0)), one(eager, asked(0))
    assert first.tags == () and second.tags == ("kvcomm",)
    np.testing.assert_array_equal(second.tokens, first.tokens)
    np.testing.assert_allclose(second.logprobs, first.logprobs, atol=2e-4)
    stats = eager.stats()
    known = HEAD + NOTES + MIDDLE + SAID  # the end is short, and computed
    assert (stats["kvcomm_reused_tokens"], stats["kvcomm_prompt_tokens"]) == (known, 2 * (known + TAIL))
    assert stats["kvcomm_reuse"] == known / (2 * (known + TAIL)) and stats["kvcomm_anchors"] == 2
    assert stats["kvcomm_base_tokens"] == known
    assert_no_page_is_held(eager)


def test_rotation_alone_lacks_what_the_context_adds() -> None:
    plain, alone = engine(None), engine(EAGER.clone(offsets=False))
    expected, found = one(plain, asked(0)), one(alone, asked(0))
    assert found.tags == ("kvcomm",) and abs(found.logprobs[0] - expected.logprobs[0]) > 1e-3


def test_a_segment_that_begins_the_prompt_is_exact() -> None:
    plain, alone = engine(None), engine(EAGER.clone(offsets=False))
    request = asked(0, segments=(TokenSegment(HEAD + NOTES + MIDDLE + SAID + TAIL, "notes"),))
    expected, found = one(plain, request), one(alone, request)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-4)


def test_approximations_are_no_prefix_of_others_and_cached_prefixes_come_first() -> None:
    plain, eager = engine(None), engine(EAGER, enable_prefix_caching=True)
    requests = [asked(0), asked(1, 1, 1), asked(2, 1, 1, segments=())]
    expected = [one(plain, request) for request in requests]
    first, second, third = (one(eager, request) for request in requests)
    assert_same([first, third], [expected[0], expected[2]])
    assert second.tags == ("kvcomm",) and third.tags == ()
    again = one(eager, asked(0))  # the whole pages are there: what is left is too little to reuse
    assert again.tags == () and eager.stats()["prefix_cache_hit_tokens"] > 0
    assert_same([again], [expected[0]])
    assert_no_page_is_held(eager)


def test_all_samples_of_a_reused_prompt_are_tagged_and_a_new_version_begins_without_anchors() -> None:
    eager = engine(EAGER)
    eager.generate([asked(0)])
    assert {rollout.tags for rollout in eager.generate([asked(1, samples=2)])} == {("kvcomm",)}
    eager.set_weights(params(1), 6)
    assert eager.stats()["kvcomm_anchors"] == 0
    fresh = make_engine(params(1), 6, enable_prefix_caching=False, **SIZES)
    assert_same([one(eager, asked(2))], [one(fresh, asked(2))])


def test_weights_that_change_within_a_prompt_leave_no_anchor_of_both() -> None:
    eager = engine(EAGER, prefill_tokens=64, max_prompt_tokens=200, prefills_per_iteration=1)
    eager.submit(asked(1, segments=(), stop=StopConditions(max_new_tokens=24)))
    while not eager.stats()["running"]:
        eager.step()
    tokens = np.random.default_rng(5).integers(0, VOCAB, 200).astype(np.int32)
    long = (TokenSegment(HEAD), TokenSegment(193, "notes"))
    eager.submit(Request(Prompt(0, "agents", tokens), segments=long, stop=STOP))
    eager.step()
    assert eager.stats()["kvcomm_base_tokens"] == 199 and eager.stats()["waiting"] == 1  # a part of it is computed
    eager.set_weights(params(1), 6)
    outputs = drain(eager)
    assert eager.stats()["kvcomm_anchors"] == 0
    assert "mixed-cache" in outputs[1].rollouts[0].tags


def test_prompts_of_spawned_completions_and_observations_have_segments() -> None:
    eager = engine(EAGER)
    request = asked(0)

    def answer(completion: Any) -> Any:
        del completion
        yield Generate(2)

    def loop(completion: Any) -> Any:
        child = yield Spawn(request.prompt.tokens.tolist(), answer, 2, None, SEGMENTS)
        yield Join((child,))
        yield Observe(request.prompt.tokens.tolist()[: HEAD + NOTES], SEGMENTS[:2])
        yield Generate(2)

    short = Prompt(9, "agents", np.array([5, 6], np.int32))
    for reused in (False, True):
        number = eager.submit(Request(short, agent_loop=loop))
        output = drain(eager)[number]
        tags = ("kvcomm",) if reused else ()
        assert output.rollouts[0].tags == tags and output.spawned[0][1].tags == tags


def test_without_room_for_bases_a_prompt_is_computed() -> None:
    pages = 1 + -(-(40 + 6) // 8)  # for one sequence
    plain, eager = engine(None, pages=pages), engine(EAGER, pages=pages)
    requests = [asked(number, number % 3, number % 2) for number in range(6)]
    assert len(eager.generate(requests)) == len(plain.generate(requests)) == 6
    assert_no_page_is_held(eager)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_cache_dtype": "int8"}, "kvcomm: expected None with an int8 cache"),
        ({"tiers": HostTiers.Config()}, "kvcomm: expected None with an int8 cache, with tiers"),
        ({"mesh": {"tensor": 2}}, "or on several devices"),
        ({"model": test_engine_routing.RECORDING}, "None for a policy whose routing is recorded"),
    ],
)
def test_engines_that_cannot_reuse_segments_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine(EAGER, **{"enable_prefix_caching": True, **changes})


def test_keys_that_are_not_rotated_by_their_position_alone_are_refused() -> None:
    policy: Any = POLICY.clone()
    policy.block.attention.rope = Rope.Config(scaling=DynamicScaling.Config(original_length=16))
    with pytest.raises(ConfigError, match="rotate keys by other angles"):
        engine(EAGER, model=policy)


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ((TokenSegment(35, "notes"),), "its segments have 35 tokens; expected 36"),
        ((TokenSegment(36), TokenSegment(0, "said")), "placeholder 'said' has 0 tokens; expected 1 or more"),
    ],
)
def test_segments_that_are_not_the_prompts_are_refused(segments: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        engine(None).submit(asked(0, segments=segments))


def test_an_objective_that_does_not_correct_is_refused() -> None:
    cfg = tiny_experiment()
    cfg.engine.kvcomm = KVComm.Config()
    with pytest.raises(ConfigError, match=r"expected TruncatedImportance.Config, as rollouts are of kvcomm"):
        cfg.check()
