"""Training and held-out questions are disjoint, and every process sees the same ones."""

import functools
import hashlib
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import from_text, to_text
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh.errors import UserError
from rl.tasks.encoding import encode_prompt
from rl.tasks.family import TaskFamily
from rl.tasks.heldout import is_heldout
from rl.tasks.mixture import TaskMixture
from rl.tasks.supervised import SupervisedSource


def mixture_config(seed: int = 0, heldout_every: int = 8) -> TaskMixture.Config:
    return TaskMixture.Config(
        families=(
            TaskFamily.Config(name="chain_sum", params={"max_terms": 2, "max_digits": 2}),
            TaskFamily.Config(name="gcd", params={"max_value": 60}, weight=2.0),
            TaskFamily.Config(name="spell_backward", params={"max_word_len": 4}, weight=0.5),
        ),
        seed=seed,
        heldout_every=heldout_every,
    )


@functools.cache
def shared_mixture() -> TaskMixture:
    """Return the default mixture; not when this file is imported, since its library takes seconds to import."""
    return mixture_config().build()


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**40), heldout_every=st.integers(2, 12))
def test_no_training_question_is_held_out(seed: int, heldout_every: int):
    mixture = mixture_config(seed, heldout_every).build()
    heldout = mixture.heldout(15)
    questions = {p.question for p in heldout}
    assert len(questions) == len(heldout) == 45
    train = [mixture.train(i) for i in range(700)]
    assert not questions & {p.question for p in train}
    assert not {p.id for p in heldout} & {p.id for p in train}
    assert len({p.id for p in train}) == 700
    mixture.check_disjoint(100, 15)


def test_check_disjoint_compares_the_texts_themselves():
    mixture = mixture_config().build()
    mixture.heldout(100)
    mixture.heldout_every = 7  # breaks the split: training now avoids other questions
    with pytest.raises(UserError, match="training problem .* asks the held-out question 'Find"):
        mixture.check_disjoint(3000, 100)


def test_the_split_is_the_documented_hash_and_about_one_in_eight():
    questions = [f"What is {i} + {i}?" for i in range(8000)]
    for question in questions[:50]:
        digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
        assert is_heldout(question, 8) == (int.from_bytes(digest, "big") % 8 == 0)
    share = np.mean([is_heldout(q, 8) for q in questions])
    assert 1 / 8 - 0.02 < share < 1 / 8 + 0.02


def test_problems_come_back_by_id():
    for problem in [*(shared_mixture().train(i) for i in (0, 1, 2, 3, 1000)), *shared_mixture().heldout(3)]:
        assert mixture_config().build().problem(problem.id) == problem
    for problem_id in (-1, 2**31):
        with pytest.raises(KeyError, match="ids of a mixture"):
            shared_mixture().problem(problem_id)


def test_families_take_turns_in_proportion_to_their_weights():
    names = [shared_mixture().train(i).family for i in range(14)]
    assert names == ["gcd", "chain_sum", "gcd", "spell_backward", "gcd", "chain_sum", "gcd"] * 2


def test_a_family_of_weight_zero_is_held_out_only():
    families = (
        TaskFamily.Config(name="gcd"),
        TaskFamily.Config(name="lcm", weight=0.0),
    )
    mixture = TaskMixture.Config(families=families).build()
    assert {mixture.train(i).family for i in range(20)} == {"gcd"}
    assert {p.family for p in mixture.heldout(2)} == {"gcd", "lcm"}


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5))
@settings(deadline=None, max_examples=20)
def test_any_stretch_holds_the_families_in_proportion(weights: list[float]):
    families = tuple(TaskFamily.Config(name="gcd", label=f"f{i}", weight=w) for i, w in enumerate(weights))
    mixture = TaskMixture.Config(families=families).build()
    counts = dict.fromkeys(mixture.family_names, 0)
    for i in range(60):
        counts[mixture.train(i).family] += 1
        for name, weight in zip(mixture.family_names, weights, strict=True):
            expected = (i + 1) * weight / sum(weights)
            assert abs(counts[name] - expected) <= len(weights)


def test_too_few_questions_say_how_many_there_are():
    family = TaskFamily.Config(name="products", params={"max_digits": 1})
    mixture = TaskMixture.Config(families=(family,)).build()
    every = {f"{a} * {b}" for a in range(10) for b in range(10)}
    text = "Solve the following multiplication: {}. Give only the result as your final answer."
    count = sum(is_heldout(text.format(product), 8) for product in every)
    with pytest.raises(UserError, match=f"'products' has {count} distinct held-out questions"):
        mixture.heldout(50)
    assert len(mixture.heldout(count)) == count


def test_held_out_lists_are_prefixes_of_longer_ones():
    longer, shorter = shared_mixture().heldout(20), mixture_config().build().heldout(7)
    assert shorter == [*longer[:7], *longer[20:27], *longer[40:47]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heldout_every": 1}, "heldout_every: expected 2 or more"),
        ({"families": ()}, "families: expected families of different labels"),
        ({"families": (TaskFamily.Config(name="gcd"),) * 2}, "families: expected families of different labels"),
        ({"families": (TaskFamily.Config(name="gcd", weight=0.0),)}, "nothing to train on"),
    ],
)
def test_mixtures_that_cannot_work_are_refused(change: dict, message: str):
    with pytest.raises(UserError, match=message):
        mixture_config().set(**change).build()


DIGEST = """
import hashlib, sys
from axlearn_like.config import from_text
mixture = from_text(sys.stdin.read()).build()
problems = [mixture.train(i) for i in range(200)] + mixture.heldout(40)
print(hashlib.blake2b(repr(problems).encode()).hexdigest())
"""


@pytest.mark.slow
def test_every_process_sees_the_same_problems():
    text = to_text(mixture_config(seed=11))
    assert from_text(text) == mixture_config(seed=11)
    digests = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        digests.add(
            subprocess.run(
                [sys.executable, "-c", DIGEST],
                input=text,
                env=env,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    mixture = mixture_config(seed=11).build()
    problems = [mixture.train(i) for i in range(200)] + mixture.heldout(40)
    digests.add(hashlib.blake2b(repr(problems).encode()).hexdigest() + "\n")
    assert len(digests) == 1


def test_supervised_examples_end_in_the_answer_and_its_loss():
    tokenizer = ByteTokenizer.Config().build()
    config = SupervisedSource.Config(mixture=mixture_config(), num_examples=30, start=5)
    source = pickle.loads(pickle.dumps(config.build()))
    assert len(source) == 30
    for i in (0, 7, 29):
        problem, example = shared_mixture().train(5 + i), source[i]
        tokens, loss_mask = example["tokens"], example["loss_mask"]
        assert (tokens.dtype, loss_mask.dtype) == (np.int32, np.bool_)
        prompt = encode_prompt(problem.question, tokenizer)
        assert tokenizer.decode(prompt) == problem.question + "\n"
        assert tokens[0] == tokenizer.bos and tokens[-1] == tokenizer.eos
        np.testing.assert_array_equal(tokens[~loss_mask], prompt)
        assert tokenizer.decode(tokens[loss_mask]) == problem.answer
        assert loss_mask[-1] and not loss_mask[: len(prompt)].any()
    with pytest.raises(IndexError, match="example 30 of 30"):
        source[30]


def test_families_without_answers_of_their_own_are_no_examples_for_supervision():
    mixture = TaskMixture.Config(families=(TaskFamily.Config(name="rush_hour"),))
    assert mixture.build().train(0).answer == ""
    with pytest.raises(UserError, match="'rush_hour' has no answers that score 1"):
        SupervisedSource.Config(mixture=mixture, num_examples=3).build()
