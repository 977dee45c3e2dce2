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
    assert len(TOKENS.encode(problem.retrieved)) == 64
    name = problem.question.removesuffix("?")
    behind = {part[:2] for part in problem.retrieved.split(f" {name}")[1:]}
    assert name in NAMES and behind == {problem.answer}


@pytest.mark.parametrize("order", ["shared_first", "role_first"])
def test_examples_have_the_prompts_of_the_environment_with_right_peers(order: Any) -> None:
    problem, roles = lookup(3, words=32), lookup_roles()
    game: Any = Agents.Config(roles=roles, forms=FORMS, consults=("base",), order=order).build()
    found = game.reset({"question": problem.question, "asked": problem.question, "retrieved": problem.retrieved})
    for role in roles[:-1]:
        assert isinstance(found, Consult) and found.prompt == role_prompt(problem, role, order)
        found = game.hear(problem.answer)
    if order == "shared_first":  # behind the problem's own prompt, with the line end of prompts
        assert f"{problem.question}\n{found[0]}" == f"{role_prompt(problem, roles[-1], order)}\n"


def test_the_loss_is_on_the_answers_of_all_roles() -> None:
    examples = LookupExamples.Config(num_examples=12).build()
    for index in range(12):
        example, problem = examples[index], lookup(lookup_seed(index), words=48)
        tokens, mask = example["tokens"], example["loss_mask"]
        order = ("shared_first", "role_first")[index % 2]
        prompt, _ = encode_segments(role_prompt(problem, lookup_roles()[index % 3], order), TOKENS)
        np.testing.assert_array_equal(tokens[: len(prompt)], prompt)
        first = mask[: len(prompt) + 1]
        assert first[-1] and first.sum() == 1 + index % 3  # its own answer, and those of its peers
        assert {TOKENS.decode([token]) for token in tokens[: len(prompt) + 1][first].tolist()} == {problem.answer}
        others = TOKENS.decode(tokens[len(prompt) + 1 :].tolist()).split("?")
        for before, after in zip(others, others[1:], strict=False):
            assert f" {before[-3:]}{after.strip()[:2]}" in problem.retrieved
        assert mask[len(prompt) + 1 :].sum() == len(others) - 1 > 1
    with pytest.raises(UserError, match="example 12 of 12"):
        examples[12]


def test_the_experiment_is_complete_and_reads_again() -> None:
    cfg = lookup_rl().set(start_from=None)
    assert to_text(from_text(to_text(cfg))) == to_text(cfg)
    check_policies(cfg, "inprocess")
