"""Answers of tasks, demonstrations and observations as tokens: as the policy is asked, and as it would draw them."""

from typing import Any

import numpy as np
import pytest

from axlearn_like.input import Chat
from axlearn_like.tokenizers.chat import encode_chat
from rl.environments.turns import Turns
from rl.protocol.messages import Problem
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.agent_loops.interruption import Interruption
from rl.tasks.encoding import encode_problem, encode_solution
from rl.tasks.preferences import completion_of
from tests.axlearn_like.tokenizers.kinds import KINDS, TEMPLATES, library, tokenizer

PROBLEM = Problem(id=1, family="sums", question="is the sum", answer="the answer", entry={})


class Tasks:
    """Tasks of one problem."""

    def without_answers(self) -> list[str]:
        return []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["", *TEMPLATES])
def test_an_answer_is_encoded_as_sft_learns_it(kind: str, template: str) -> None:
    built = tokenizer(kind, template)
    prompt, drawn = encode_solution(PROBLEM, PROBLEM.answer, built)
    assert prompt.tolist() == encode_problem(PROBLEM, built).tolist()
    if template:
        said: Any = [{"role": "user", "content": PROBLEM.question}, {"role": "assistant", "content": PROBLEM.answer}]
        ids, learned = Chat.Config().build(tokenizer=built).encode({"messages": said}, "row")
        assert prompt.tolist() == encode_chat(built, said[:1], add_generation_prompt=True)
        assert list(ids)[: len(prompt) + len(drawn)] == [*prompt, *drawn] and sum(learned) == len(drawn)
    else:
        text = library(kind).encode(f"{PROBLEM.question}\nthe answer", add_special_tokens=False).ids
        assert [*prompt, *drawn] == [*([] if built.bos is None else [built.bos]), *text, built.eos]
    (shown,) = GroupDemonstrations.Config(max_new_tokens=64).build(tasks=Tasks(), tokenizer=built).answers(PROBLEM)
    np.testing.assert_array_equal(shown, drawn)
    read = completion_of(PROBLEM, PROBLEM.answer, built)
    np.testing.assert_array_equal(read.prompt, prompt)
    np.testing.assert_array_equal(read.tokens[: len(drawn)], drawn)
    assert read.drawn.sum() == len(drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_inside_a_completion_has_no_blank_before_it(kind: str) -> None:
    built = tokenizer(kind)
    turns = Turns(built, PROBLEM)
    turns.action(built.encode("is\n"))
    text = library(kind).encode("is\nthe answer", add_special_tokens=False).ids
    given = turns.observation("the answer")
    assert given == text[len(built.encode("is\n")) :]
    words = Interruption.Config(at=4, words="the answer", until="answer").build(tokenizer=built)
    assert words.longest == 4 + len(given)
