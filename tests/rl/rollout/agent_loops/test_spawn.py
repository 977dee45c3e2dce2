"""Completions spawned by others: drawn by the tree alone, read as they come, over with their parent, and limited."""

import itertools
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from mesh import UserError
from rl.rollout.agent_loops.commands import (
    AgentLoop,
    Command,
    Completion,
    Fork,
    Generate,
    Join,
    Observe,
    Spawn,
    child_sample,
)
from rl.rollout.agent_loops.commands import single_turn as once
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import RequestOutput
from rl.rollout.scheduling.spawning import MAX_CHILDREN, MAX_DEPTH, MAX_TREE
from rl.rollout.scheduling.timeline import event_fields
from tests.rl.rollout.agent_loops.loops import WHOLE, run
from tests.rl.rollout.small import MAX_NEW, MAX_PROMPT, assert_same, drain, make_engine, params, request, scores

Commands = Generator[Command, Any, None]
BASE = list(range(1, 18))


def family(completion: Completion) -> Commands:
    """Two children, of which one has a child; their tokens are given to the parent."""

    def elder(child: Completion) -> Commands:
        yield Generate(4)
        grandchild = yield Spawn([*BASE, 40], once, max_new_tokens=3)
        (below,) = yield Join((grandchild,))
        yield Observe(below.tokens.tolist())
        yield Generate(2)

    yield Generate(3)
    first = yield Spawn([*BASE, 41], elder)
    second = yield Spawn([*BASE, 42], once, max_new_tokens=6)
    yield Generate(2)
    for rollout in (yield Join((first, second))):
        yield Observe(rollout.tokens.tolist())
    yield Generate(1)


def flat(output: RequestOutput) -> list[Any]:
    return [*output.rollouts, *(rollout for _, rollout in output.spawned)]


def test_a_program_has_a_timeline_with_its_tools_and_all_that_it_spawned(engine: RolloutEngine) -> None:
    def with_tool(completion: Completion) -> Commands:
        completion.trace([("search", 1.0, 2.0)])
        yield from family(completion)

    lanes = dict(run(engine, with_tool).lanes)
    assert list(lanes) == ["sample 0", "sample 0: tools", "child 1", "child 1.1", "child 2"]
    assert lanes["sample 0: tools"] == (("search", 1.0, 2.0),)
    for name, spans in lanes.items():
        assert all(before.ended <= after.began for before, after in itertools.pairwise(spans)), name
    kinds = [span.kind for span in lanes["sample 0"]]
    assert kinds[:2] == ["queue", "draw"] and "join" in kinds and "join" in [span.kind for span in lanes["child 1"]]
    (first,), (last,) = ([span for span in lanes["sample 0"] if span.kind == "join"], lanes["child 1.1"][-1:])
    assert first.began <= last.ended <= first.ended
    fields = event_fields(run(engine, once).lanes)
    assert fields is None, "it did nothing but draw"


@pytest.mark.slow
@pytest.mark.numerics
def test_a_tree_draws_from_its_own_prompts_by_ids_that_follow_from_the_tree(engine: RolloutEngine) -> None:
    output = run(engine, family, stop=WHOLE)
    (parent,), children = output.rollouts, output.spawned
    assert [prompt.tolist() for prompt, _ in children] == [[*BASE, 41], [*BASE, 40], [*BASE, 42]]
    ids = [child_sample(0, 0), child_sample(child_sample(0, 0), 0), child_sample(0, 1)]
    assert [rollout.sample_id for _, rollout in children] == ids and len(set(ids)) == 3
    assert [len(rollout.tokens) for _, rollout in children] == [9, 3, 6]
    elder, grandchild, second = (rollout for _, rollout in children)
    np.testing.assert_array_equal(elder.tokens[4:7], grandchild.tokens)
    np.testing.assert_array_equal(parent.tokens[5:20], [*elder.tokens, *second.tokens])
    assert parent.action_mask.sum() == 6 and elder.action_mask.sum() == 6
    for prompt, rollout in children:
        asked = request(3).prompt
        asked = type(asked)(asked.id, asked.family, prompt)
        (scored,) = scores(params(), [(asked, rollout)], 0.8)
        drawn = rollout.action_mask
        np.testing.assert_allclose(rollout.logprobs[drawn], scored[drawn], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"steps_per_dispatch": 1}, {"pages": 12}, {"max_num_seqs": 1}])
def test_a_tree_is_drawn_again_to_the_bit_in_any_company(engine: RolloutEngine, changes: dict[str, Any]) -> None:
    expected = flat(run(engine, family, samples=2, stop=WHOLE))
    other = make_engine(**changes)
    numbers = [other.submit(request(n, samples=3, stop=WHOLE)) for n in (0, 1)]
    numbers.append(other.submit(request(3, samples=2, stop=WHOLE, agent_loop=family)))
    found = flat(drain(other)[numbers[-1]])
    assert_same(found, expected)


def test_children_compute_once_what_they_share_with_their_parent() -> None:
    def parent(completion: Completion) -> Commands:
        yield Generate(8)
        tokens = [*completion.prompt.tolist(), *completion.output_tokens.tolist()]
        children = []
        for own in (1, 2, 3):
            children.append((yield Spawn([*tokens, own], once, max_new_tokens=2)))
        yield Join(tuple(children))

    engine = make_engine(keep_completions=False)
    asked = request(4, samples=1, stop=WHOLE, agent_loop=parent)
    engine.generate([asked])
    shared = (len(asked.prompt.tokens) + 7) // 8 * 8
    assert len(asked.prompt.tokens) > 8 and engine.stats()["prefix_cache_hit_tokens"] == 3 * shared


def test_a_parent_reads_the_tokens_of_its_child_as_they_come() -> None:
    seen: list[int] = []

    def parent(completion: Completion) -> Commands:
        child, text = (yield Spawn(BASE, once, max_new_tokens=20)), []
        while True:
            (rollout,) = yield Join((child,), after=(len(text),))
            assert rollout.tokens[: len(text)].tolist() == text
            text = rollout.tokens.tolist()
            seen.append(len(text))
            if rollout.finish_reason != "abort":
                break
        assert child.ended and len(text) == 20
        yield Observe(text)
        yield Generate(1)

    engine = make_engine()
    number = engine.submit(request(3, samples=1, stop=WHOLE, agent_loop=parent))
    output = drain(engine)[number]
    assert output.error is None and len(seen) > 3 and seen == sorted(seen)


def test_a_child_that_is_not_awaited_ends_with_its_parent(engine: RolloutEngine) -> None:
    def parent(completion: Completion) -> Commands:
        yield Spawn(BASE, once)
        yield Generate(1)

    output = run(engine, parent)
    ((_, child),) = output.spawned
    assert output.error is None and child.finish_reason == "abort" and len(child.tokens) < MAX_NEW


def test_a_child_that_fails_raises_where_it_is_joined(engine: RolloutEngine) -> None:
    def broken(child: Completion) -> Commands:
        yield Generate(2)
        raise KeyError("broken")

    def parent(completion: Completion) -> Commands:
        child = yield Spawn(BASE, broken)
        other = yield Spawn(BASE, once, max_new_tokens=2)
        with pytest.raises(UserError, match="broken"):
            yield Join((child, other))
        yield Generate(1)

    output = run(engine, parent)
    assert output.error is None and len(output.rollouts[0].tokens) == 1


def nested(depth: int) -> AgentLoop:
    def loop(completion: Completion) -> Commands:
        if depth:
            yield Join(((yield Spawn(BASE, nested(depth - 1))),))
        yield Generate(1)

    return loop


def wide(children: int, below: int = 0) -> AgentLoop:
    def loop(completion: Completion) -> Commands:
        found = []
        for _ in range(children):
            found.append((yield Spawn(BASE, wide(below) if below else once, max_new_tokens=1)))
        yield Join(tuple(found))
        yield Generate(1)

    return loop


def joins_its_parent(completion: Completion) -> Commands:
    def child(one: Completion) -> Commands:
        yield Generate(1)
        yield Join((completion,))

    yield Join(((yield Spawn(BASE, child)),))


def spawns(prompt: list[int], limit: int | None = None) -> AgentLoop:
    def loop(completion: Completion) -> Commands:
        yield Spawn(prompt, once, limit)

    return loop


def joins_with(after: tuple[int, ...]) -> AgentLoop:
    def loop(completion: Completion) -> Commands:
        (copy,) = yield Fork(once, (5,))
        yield Join((copy,), after)

    return loop


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (nested(MAX_DEPTH + 1), f"depth {MAX_DEPTH + 1}"),
        (wide(MAX_CHILDREN + 1), f"more than {MAX_CHILDREN}"),
        (wide(5, MAX_CHILDREN), f"more than {MAX_TREE}"),
        (joins_its_parent, "waits for it"),
        (spawns([1] * (MAX_PROMPT + 1)), "max_prompt_tokens"),
        (spawns([]), "has 0 tokens"),
        (spawns([10**6]), "vocabulary"),
        (spawns(BASE, MAX_NEW + 1), "max_new_tokens"),
        (joins_with((1, 2)), "numbers of tokens"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_by_name(engine: RolloutEngine, loop: AgentLoop, says: str) -> None:
    output = run(engine, loop)
    assert output.error is not None and says in output.error


def test_a_tree_within_the_limits_is_drawn(engine: RolloutEngine) -> None:
    assert run(engine, nested(MAX_DEPTH)).error is None
    assert len(run(engine, wide(MAX_CHILDREN)).spawned) == MAX_CHILDREN
