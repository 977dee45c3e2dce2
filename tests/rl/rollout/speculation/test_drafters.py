"""Drafters and the choice of what is drafted: host code, no device."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import UserError
from rl.rollout.agent_loops.commands import single_turn
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.speculation.draft import CONTEXT, NOTHING, Draft, as_row, continuation, longest_suffix
from rl.rollout.speculation.own_text import OwnTextDrafter
from rl.rollout.speculation.siblings import SiblingDrafter
from rl.rollout.speculation.speculator import Speculation
from tests.rl.tiny import make_prompt

COUNT = 64
TEXT = st.lists(st.integers(NOTHING, 3), max_size=60)


def group_of(*completions: list[int], number: int = 0, prompt: int = 5) -> SequenceGroup:
    """An unfinished request with these completions of one prompt."""
    request = Request(make_prompt(prompt, 6), samples=len(completions))
    group = SequenceGroup(number, request, Sampler.Config(), StopConditions(max_new_tokens=100), None, None)
    for sample, tokens in enumerate(completions):
        Sequence(group, sample, [*request.prompt.tokens.tolist(), *tokens], single_turn)
    return group


def expected_next(draft: Draft | None) -> list[int]:
    """The first tokens of a draft's continuation."""
    assert draft is not None
    tokens = draft.tokens.tolist()
    return tokens[: tokens.index(NOTHING)] if NOTHING in tokens else tokens


@given(TEXT, st.lists(st.integers(0, 3), max_size=6))
def test_the_longest_suffix_is_found_at_every_place(text: list[int], recent: list[int]):
    places, matched = longest_suffix(np.array(text, np.int32), np.array(recent, np.int32))

    def length(place: int) -> int:
        back = range(1, min(place, len(recent)) + 1)
        return next((n - 1 for n in back if text[place - n] != recent[-n]), len(back))

    lengths = {place: length(place) for place in range(len(text)) if text[place] != NOTHING}
    best = max(lengths.values(), default=0)
    assert matched == best
    assert places.tolist() == [place for place, n in lengths.items() if n == best and best]


def test_of_the_longest_matches_the_latest_of_the_most_frequent_is_continued():
    text = np.array([9, 1, 2, 5, 5, NOTHING, 1, 2, 6, 7, NOTHING, 1, 2, 6, 8, 4, 2, 3], np.int32)
    draft = continuation(text, np.array([1, 2], np.int32), 3)
    assert draft.matched == 2 and draft.tokens.tolist() == [6, 8, 4]
    assert continuation(text, np.array([0, 9, 1, 2], np.int32), 3).tokens.tolist() == [5, 5, NOTHING]
    assert continuation(text, np.array([77], np.int32), 3)[:2][1] == 0


@given(st.lists(st.integers(0, 9), max_size=12), TEXT, TEXT, st.integers(CONTEXT + 7, 99))
def test_a_row_has_the_last_tokens_then_the_best_draft_then_the_texts(
    own: list[int], first: list[int], second: list[int], count: int
):
    texts = [np.array(text, np.int32) for text in (first, second)]
    drafts = [Draft(np.array([7, 8], np.int32), 1, texts[0]), Draft(np.array([5, 6, 7], np.int32), 2, texts[1])]
    row = as_row(own, drafts, count).tolist()
    recent = own[-CONTEXT:]
    assert len(row) == count and row[CONTEXT - len(recent) : CONTEXT] == recent
    kept = min(3, (count - CONTEXT) // 4) if first or second else 3
    assert row[CONTEXT : CONTEXT + kept + 1] == [*[5, 6, 7][:kept], NOTHING]
    rest = row[CONTEXT + kept + 1 :]
    whole = [NOTHING, NOTHING, *second, NOTHING, *first]
    assert rest == ([NOTHING] * count + whole)[-len(rest) :]


def test_siblings_continue_each_other_and_themselves_at_the_first_token():
    drafter = SiblingDrafter.Config().build()
    group = group_of([50, 51, 52, 53, 54], [50, 51], [])
    _, second, third = group.sequences
    assert expected_next(drafter.draft(second, COUNT)) == [52, 53, 54]
    assert expected_next(drafter.draft(third, COUNT)) == [50, 51]  # of two the latest
    assert drafter.draft(group_of([60]).sequences[0], COUNT) is None  # alone


def test_siblings_of_now_are_read_as_they_grow():
    drafter = SiblingDrafter.Config().build()
    group = group_of([50, 51], [50])
    assert expected_next(drafter.draft(group.sequences[1], COUNT)) == [51]
    group.sequences[0].tokens += [52, 53]
    assert expected_next(drafter.draft(group.sequences[1], COUNT)) == [51, 52, 53]


def test_answers_of_earlier_requests_to_a_prompt_are_kept_up_to_a_limit():
    drafter = SiblingDrafter.Config(answers=2, memory=50).build()
    answer = list(range(50, 70))
    drafter.remember(group_of(answer))
    assert expected_next(drafter.draft(group_of([50, 51]).sequences[0], COUNT)) == answer[2:]
    assert drafter.draft(group_of([50, 51], prompt=7).sequences[0], COUNT) is None  # another prompt
    for number in range(3):
        drafter.remember(group_of(answer[number:], number=number))
    assert drafter.held == 19 + 18  # of this prompt the last two
    drafter.remember(group_of(answer, prompt=7))
    assert drafter.held == 20  # both would be 57
    assert drafter.draft(group_of([50, 51]).sequences[0], COUNT) is None
    assert not drafter._running
    SiblingDrafter.Config(memory=0).build().remember(group_of(answer))


def test_own_text_is_continued_after_its_repeated_end():
    drafter = OwnTextDrafter.Config().build()
    assert expected_next(drafter.draft(group_of([50, 51, 52, 53, 50, 51]).sequences[0], COUNT))[:2] == [52, 53]
    assert expected_next(drafter.draft(group_of([50, 51, 52, 53]).sequences[0], COUNT)) == []
    drafter.remember(group_of([1]))


def proposing(**changes: Any) -> Speculation:
    return Speculation.Config(**{"text": COUNT, **changes}).build()


def measure(speculation: Speculation, sequences: list[Sequence], accepted: int, missed: int) -> None:
    ones = np.ones(len(sequences), np.int32)
    out = {"steps": 4, "drafted": 4 * ones, "accepted": accepted * ones, "missed": missed * ones}
    speculation.measured(sequences, out)


def test_few_rows_have_deep_drafts_and_many_have_none():
    sequences = group_of(*[[50, 51, 52]] * 8, [50, 51, 52, 53, 54]).sequences
    speculation = proposing()
    for rows, chunk in ((1, 8), (2, 6), (4, 3)):
        found = speculation.propose(sequences[:rows], rows=rows, plain_rows=8)
        assert found is not None and found.chunk == chunk
        assert found.tokens.shape == (rows, COUNT) and 0 < max(found.depths) < chunk
    assert speculation.propose(sequences[:8], rows=8, plain_rows=8) is None
    wider = proposing(most_tokens=32, overhead=64)
    found = wider.propose(sequences[:8], rows=8, plain_rows=8)
    assert found is not None and found.chunk == 4
    assert wider.propose(sequences, rows=32, plain_rows=32) is None


def test_bad_drafts_end_drafting_until_it_is_tried_again():
    sequences = group_of([50, 51, 52], [50]).sequences
    speculation = proposing(most_tokens=32)
    before = speculation.propose(sequences, rows=2, plain_rows=8)
    measure(speculation, sequences, accepted=60, missed=4)
    good = speculation.propose(sequences, rows=2, plain_rows=8)
    assert before is not None and good is not None and max(good.depths) > max(before.depths)
    for _ in range(4):
        measure(speculation, sequences, accepted=0, missed=32)
    assert speculation.propose(sequences, rows=2, plain_rows=8) is None
    assert any(speculation.propose(sequences, rows=2, plain_rows=8) for _ in range(30))
    stats = speculation.stats()
    assert (stats["drafted_tokens"], stats["accepted_tokens"], stats["draft_dispatches"]) == (40, 120, 5)


def test_without_adaption_whatever_has_a_draft_is_drafted():
    sequences = group_of([50, 51, 52], [50], []).sequences
    speculation = proposing(adaptive=False)
    measure(speculation, sequences, accepted=0, missed=99)
    found = speculation.propose(sequences, rows=4, plain_rows=4)
    assert found is not None and found.depths.tolist() == [2, 2, 2, 0]
    speculation.refuse(sequences[1])
    found = speculation.propose(sequences, rows=4, plain_rows=4)
    assert found is not None and found.depths.tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize("field", [{"depth": 0}, {"drafters": ()}, {"most_tokens": 7}, {"text": 9}, {"overhead": -1}])
def test_what_cannot_be_is_refused(field: dict[str, Any]):
    with pytest.raises(UserError, match=next(iter(field))):
        Speculation.Config(**field).check()
