"""Pairs of right and wrong answers."""

import numpy as np

from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.demo.data import task_mixture
from rl.tasks.preferences import PreferenceSource


def test_the_chosen_answer_is_right_and_the_other_wrong_and_both_are_reproducible():
    mixture = task_mixture(0)
    cfg = PreferenceSource.Config(mixture=mixture, num_examples=12)
    source, tasks, tokenizer = cfg.build(), mixture.build(), ByteTokenizer.Config().build()
    for index in range(len(source)):
        example, problem = source[index], tasks.train(index)
        parts = np.split(example["tokens"], np.nonzero(example["positions"] == 0)[0][1:])
        texts = [tokenizer.decode(part[1:-1].tolist()).partition("\n") for part in parts]
        assert {text[0] for text in texts} == {problem.question}
        right, wrong = (tasks.score(problem, text[2]) for text in texts)
        assert right == 1.0 > wrong
    again = cfg.build()[3]["tokens"]
    np.testing.assert_array_equal(again, source[3]["tokens"])


def test_held_out_pairs_ask_no_question_of_training():
    cfg = PreferenceSource.Config(mixture=task_mixture(0), num_examples=4, heldout=True)
    source, heldout = cfg.build(), task_mixture(0).build().heldout(4)
    assert len(source) == len(heldout) == 12
    text = ByteTokenizer.Config().build().decode(source[5]["tokens"][1:].tolist())
    assert text.startswith(heldout[5].question)
