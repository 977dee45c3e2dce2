"""Agents: who sees what, prompts that begin alike as far as they can, and placeholders without text."""

import pickle
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axlearn_like.config import ConfigError, from_text, to_text
from axlearn_like.tokenizers.protocol import answer_text, completion_text
from rl.environments.agents import AgentRole, Agents, shared_order
from rl.environments.environment import Consult
from rl.protocol.messages import Prompt
from rl.protocol.segments import SegmentedText
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.engine import RolloutEngine
from rl.tasks.encoding import encode_problem, encode_prompt, encode_segments
from tests.rl.environments.toys import TOKENIZER, tasks
from tests.rl.rollout.small import assert_no_page_is_held, drain
from tests.rl.tiny import tiny_params, tiny_policy

ROLES = (
    AgentRole.Config(name="solver", instruction="Solve it.", sees=("notes",)),
    AgentRole.Config(name="critic", instruction="Find the mistake.", sees=("solver", "notes")),
    AgentRole.Config(name="editor", instruction="Answer.", sees=("notes", "critic", "solver")),
)
CFG = Agents.Config(roles=ROLES, forms={"notes": "<{}>"}, consults=("base",), deadline_s=5.0)
ROW = {"question": "1+1?", "notes": "one and one"}


def shown(cfg: Agents.Config, row: dict[str, Any], answers: tuple[str, ...] = ("two", "three")) -> list[SegmentedText]:
    """Return what the roles are shown, in order."""
    game: Any = cfg.build()
    found, prompts = game.reset(row), list[SegmentedText]()
    for answer in answers:
        assert isinstance(found, Consult) and found.policy == "base"
        prompts.append(found.prompt)  # pyright: ignore[reportArgumentType]
        found = game.hear(answer)
    assert game.step("2") == ("", 0.0, True)
    return [*prompts, found[0]]


def test_roles_see_the_question_then_what_most_see_then_answers_as_they_come() -> None:
    assert shown(CFG, ROW) == [
        "1+1?\n<one and one>Solve it.",
        "1+1?\n<one and one>solver: two\nFind the mistake.",
        "<one and one>solver: two\ncritic: three\nAnswer.\n",  # behind the problem's own prompt
    ]


def test_instructions_come_first_where_the_order_says_so() -> None:
    solver, critic, editor = shown(CFG.clone(order="role_first"), ROW)
    assert solver == "Solve it.1+1?\n<one and one>" and critic.startswith("Find the mistake.1+1?")
    assert editor.startswith("Answer.<one and one>")


def test_segments_say_which_text_comes_from_where() -> None:
    (_, critic, _) = shown(CFG, ROW)
    assert [(one.placeholder, one.text) for one in critic.segments if one.placeholder] == [
        ("question", "1+1?\n"),
        ("notes", "one and one"),
        ("solver", "two"),
    ]
    tokens, spans = encode_segments(critic, TOKENIZER)
    assert sum(one.tokens for one in spans) == len(tokens)
    np.testing.assert_array_equal(tokens, encode_prompt(critic, TOKENIZER))  # bytes: every border is one of tokens


def test_a_copy_of_a_text_has_its_segments() -> None:
    (text, *_) = shown(CFG, ROW)
    copy = pickle.loads(pickle.dumps(text))
    assert copy == text and copy.segments == text.segments and isinstance(copy, SegmentedText)


def longest_shared(prompts: list[tuple[str, ...]]) -> int:
    """Return the placeholders that are computed once where prompts begin alike: all, less a trie's nodes."""
    nodes = {prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)}
    return sum(map(len, prompts)) - len(nodes)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=5))
def test_no_order_shares_more_where_what_roles_see_is_nested(counts: list[int]) -> None:
    names = ("a", "b", "c", "d")
    seen = [names[:count] for count in counts]
    roles = tuple(AgentRole.Config(name=f"r{n}", instruction="", sees=one[::-1]) for n, one in enumerate(seen))

    def shared(order: tuple[str, ...]) -> int:
        return longest_shared([tuple(name for name in order if name in one) for one in seen])

    assert shared(shared_order(roles)) == max(map(shared, permutations(names)))


@pytest.mark.parametrize(
    ("row", "answers", "says"),
    [
        ({"question": "1+1?"}, (), "placeholder 'notes' of role 'solver' has no text; those with text: question"),
        ({**ROW, "notes": " "}, (), "placeholder 'notes' of role 'solver'"),
        (ROW, ("",), "placeholder 'solver' of role 'critic' has no text"),
        (ROW, ("two", "\n"), "placeholder 'critic' of role 'editor' has no text"),
        ({**ROW, "question": ""}, (), "placeholder 'question' of role 'solver' has no text"),
    ],
)
def test_a_placeholder_without_text_is_refused_by_name(
    row: dict[str, Any], answers: tuple[str, ...], says: str
) -> None:
    game: Any = CFG.build()
    with pytest.raises(ValueError, match=says):
        game.reset(row)
        for answer in answers:
            game.hear(answer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda cfg: cfg.set(roles=cfg.roles[:1]), "roles: expected 2 to 5 roles"),
        (lambda cfg: cfg.set(roles=(*cfg.roles, cfg.roles[0].clone())), "roles of different names"),
        (lambda cfg: cfg.roles[0].set(sees=("notes", "critic")), r"roles.0.sees: expected roles that speak before"),
        (lambda cfg: cfg.roles[1].set(policy="ann@-4"), "one of the environment's consults, base"),
        (lambda cfg: cfg.set(forms={"notes": "no place"}), r"forms: expected texts with '\{\}' once"),
        (lambda cfg: cfg.set(forms={"note": "{}"}), "forms: expected placeholders that a role sees, not note"),
        (lambda cfg: cfg.set(max_turns=2), "max_turns: expected 1"),
    ],
)
def test_roles_that_cannot_speak_are_refused(change: Any, says: str) -> None:
    cfg = CFG.clone()
    change(cfg)
    with pytest.raises(ConfigError, match=says):
        cfg.check()
    assert to_text(from_text(to_text(CFG))) == to_text(CFG)


@pytest.mark.slow
def test_prompts_of_an_episode_are_computed_once_as_far_as_they_begin_alike() -> None:
    policy, size = tiny_policy(TOKENIZER.vocab_size), 8
    engine = RolloutEngine.Config(
        model=policy, stop_tokens=(TOKENIZER.eos,), max_prompt_tokens=96, max_new_tokens=96, page_size=size
    ).build(decode=partial(completion_text, TOKENIZER))
    engine.set_weights(tiny_params(policy), 5)
    cfg = CFG.clone(max_turn_tokens=4)
    for role in cfg.roles:
        role.set(sees=tuple(one for one in role.sees if one != "notes"), max_new_tokens=4)
    made = tasks(cfg.set(forms={})).build()
    episodes, problem = Episodes(made, TOKENIZER, seed=3), made.train(0)
    prompt = Prompt(problem.id, problem.family, encode_problem(problem, TOKENIZER))
    number = engine.submit(episodes.request(prompt, 1, 7))
    output = drain(engine)[number]
    (rollout,) = episodes.recorded(output.rollouts, again=False)
    assert rollout.episode is not None and (rollout.episode.ended, rollout.episode.error) == ("done", "")
    said = [answer_text(TOKENIZER, one.tokens.tolist()) for _, one in output.spawned]
    begins = [prompt for prompt, _ in output.spawned] + [np.concatenate([prompt.tokens, rollout.tokens])]
    assert completion_text(TOKENIZER, begins[1].tolist()).endswith(f"solver: {said[0]}\nFind the mistake.\n")
    least = size * sum(common(*pair) // size for pair in zip(begins, begins[1:], strict=False))
    assert least >= size and engine.stats()["prefix_cache_hit_tokens"] >= least
    episodes.close()
    assert_no_page_is_held(engine)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    size = min(len(a), len(b))
    return int(np.argmin(np.append(a[:size] == b[:size], False)))
