"""A task family is reproducible everywhere, and misspelt ones are refused with the right name."""

import re

import pytest

from mesh.errors import UserError
from rl.tasks.family import TaskFamily

CHAIN_SUM = TaskFamily.Config(name="chain_sum", params={"max_terms": 2, "max_digits": 2})


def built(config: TaskFamily.Config, seed: int = 0) -> TaskFamily:
    family = config.build(seed=seed)
    assert isinstance(family, TaskFamily)
    return family


def test_items_depend_on_seed_label_and_index_alone():
    family = built(CHAIN_SUM, 3)
    items = [family.item(i) for i in (5, 0, 10_000_000)]
    again = built(CHAIN_SUM, 3)
    assert [again.item(i) for i in (5, 0, 10_000_000)] == items
    assert built(CHAIN_SUM, 4).item(5) != items[0]
    assert built(CHAIN_SUM.clone(label="other"), 3).item(5) != items[0]


def test_params_reach_the_dataset():
    questions = [built(CHAIN_SUM).item(i)["question"] for i in range(100)]
    assert all(len(re.findall(r"\d+", q)) == 2 for q in questions)
    assert all(len(n) <= 2 for q in questions for n in re.findall(r"\d+", q))


def test_a_family_that_prepares_its_items_has_no_last_one():
    family = built(TaskFamily.Config(name="gsm_symbolic"), 1)
    assert family.item(5_000) == family.item(0)
    assert family.item(123_456_789)["question"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "chain_sun"}, "unknown task family 'chain_sun'; did you mean 'chain_sum'"),
        ({"name": "qqq"}, "unknown task family 'qqq'; known: ab, acre"),
        (
            {"name": "gcd", "params": {"max_valeu": 3}},
            "'gcd' has no param 'max_valeu'; did you mean 'max_value'",
        ),
        ({"name": "gcd", "params": {"seed": 3}}, "'gcd': param 'seed' belongs to the mixture"),
        (
            {"name": "chain_sum", "params": {"max_terms": 1}},
            "refuses params {'max_terms': 1}: max_terms must be >= min_terms",
        ),
        ({"name": "gcd", "params": {"max_value": "many"}}, "'gcd': reasoning-gym refuses params"),
        ({"name": "ransom_note"}, "'ransom_note': reasoning-gym's items of this dataset differ"),
        ({"name": "composite"}, "'composite' is itself a mixture"),
        ({"name": "gcd", "weight": -1.0}, "TaskFamily.weight: expected 0 or more, got -1.0"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_built(config: dict, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        TaskFamily.Config(**config).build(seed=0)
