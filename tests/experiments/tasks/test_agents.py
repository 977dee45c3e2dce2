"""Lookups of three agents: problems that have their answer in the text, and prompts as the environment makes them."""

from typing import Any

import numpy as np
import pytest

from axlearn_like.config import from_text, to_text
from experiments.tasks.agents import (
    FORMS,
    NAMES,
    TOKENIZER,
    LookupExamples,
    lookup,
    lookup_rl,
    lookup_roles,
    lookup_seed,
    role_prompt,
)
from mesh.errors import UserError
from rl.environments.agents import Agents
from rl.environments.environment import Consult
from rl.runtime.policies.configs import check_policies
from rl.tasks.encoding import encode_segments

TOKENS = TOKENIZER.build()


@pytest.mark.parametrize("number", range(20))
def test_the_text_says_the_answer_and_never_another(number: int) -> None:
    problem = lookup(lookup_seed(number), words=64)
    assert len(TOKENS.encode(problem.retrieved)) in (63, 64)
    name = problem.question.removesuffix("?")
    behind = {part[:2] for part in problem.retrieved.split(f" {name}")[1:]}
    assert name in NAMES and behind == {problem.answer}


@pytest.mark.parametrize("order", ["shared_first", "role_first"])
def test_examples_have_the_prompts_of_the_environment_with_right_peers(order: Any) -> None:
    problem, roles = lookup(3, words=32), lookup_roles()
    game: Any = Agents.Config(roles=roles, forms=FORMS, consults=("base",), order=order).build()
    found = game.reset({"question": problem.question, "retrieved": problem.retrieved})
    for role in roles[:-1]:
        assert isinstance(found, Consult) and found.prompt == role_prompt(problem, role, order)
        found = game.hear(problem.answer)
    if order == "shared_first":  # behind the problem's own prompt, with the line end of prompts
        assert f"{problem.question}\n{found[0]}" == f"{role_prompt(problem, roles[-1], order)}\n"


def test_the_loss_is_on_the_answer_and_on_numbers_that_were_there_before() -> None:
    examples = LookupExamples.Config(num_examples=12).build()
    for index in range(12):
        example, problem = examples[index], lookup(lookup_seed(index), words=96)
        tokens, mask = example["tokens"], example["loss_mask"]
        order = ("shared_first", "role_first")[index % 2]
        prompt, _ = encode_segments(role_prompt(problem, lookup_roles()[index % 3], order), TOKENS)
        np.testing.assert_array_equal(tokens[: len(prompt)], prompt)
        assert TOKENS.decode(tokens[len(prompt) :].tolist()) == problem.answer and mask[-1]
        for place in np.flatnonzero(mask[:-1]).tolist():
            pair = tokens[place - 1 : place + 1].tolist()
            assert any(tokens[at : at + 2].tolist() == pair for at in range(place - 1)), "a number seen before"
    with pytest.raises(UserError, match="example 12 of 12"):
        examples[12]


def test_the_experiment_is_complete_and_reads_again() -> None:
    cfg = lookup_rl().set(start_from=None)
    assert to_text(from_text(to_text(cfg))) == to_text(cfg)
    check_policies(cfg, "inprocess")
