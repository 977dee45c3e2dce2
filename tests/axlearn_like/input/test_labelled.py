"""Labelled examples in files of JSON lines."""

import numpy as np
import pytest

from axlearn_like.input import InputError, LabelledInput, LabelledLines, Preference, StepLabels, TextLabel
from tests.axlearn_like.input.data import BYTES, json_lines


def test_labels_of_texts_by_number_and_by_name(tmp_path):
    files = json_lines(tmp_path / "a.jsonl", {"text": "ab", "label": 0.5}, {"text": "", "label": 2})
    source = LabelledLines.Config(files=files, tokenizer=BYTES).build()
    example = source[0]
    assert bytes(t for t in example["tokens"].tolist() if t < 256) == b"ab"
    assert example["labels"][-1] == 0.5 and np.isnan(example["labels"][:-1]).all() and len(source) == 2
    named = TextLabel.Config(classes=("bad", "good"))
    files = json_lines(tmp_path / "b.jsonl", {"text": "ab", "label": "good"}, {"text": "c", "label": "bad"})
    source = LabelledLines.Config(files=files, tokenizer=BYTES, example=named).build()
    assert [example["labels"][-1] for example in (source[0], source[1])] == [1, 0]
    for label, error in (("goods", "no class 'goods'.*good"), (None, "no class None")):
        files = json_lines(tmp_path / "c.jsonl", {"text": "ab", "label": label})
        with pytest.raises(InputError, match=f"line 1: {error}"):
            LabelledLines.Config(files=files, tokenizer=BYTES, example=named).build()
    with pytest.raises(InputError, match="line 1: expected 'label' to be a number"):
        LabelledLines.Config(files=str(tmp_path / "b.jsonl"), tokenizer=BYTES).build()


def test_each_step_has_its_label_on_the_token_that_ends_it(tmp_path):
    records = (
        {"prompt": "1+1+1?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]},
        {"prompt": "2?", "completions": "a\nbc\nd\n", "labels": [0.5, None, 1]},
    )
    files = json_lines(tmp_path / "a.jsonl", *records)
    cfg = LabelledLines.Config(files=files, tokenizer=BYTES, example=StepLabels.Config())
    source = cfg.build()
    for index, (whole, expected) in enumerate(
        (
            (b"1+1+1?\n1+1=2\n2+1=4\n", {b"1+1+1?\n1+1=2\n": 1.0, b"1+1+1?\n1+1=2\n2+1=4\n": 0.0}),
            (b"2?\na\nbc\nd\n", {b"2?\na\n": 0.5, b"2?\na\nbc\nd\n": 1.0}),
        )
    ):
        tokens, labels = source[index]["tokens"], source[index]["labels"]
        ends = np.nonzero(~np.isnan(labels))[0]
        prefixes = [bytes(t for t in tokens[: end + 1].tolist() if t < 256) for end in ends]
        assert dict(zip(prefixes, labels[ends].tolist(), strict=True)) == expected
        assert bytes(t for t in tokens.tolist() if t < 256) == whole and tokens[-1] > 255  # eos, without a label
    batch = next(LabelledInput.Config(source=cfg, seq_len=64, batch_size=1).build())
    assert sorted(batch["targets"][batch["weights"] > 0].tolist()) == [0.0, 0.5, 1.0, 1.0]
    assert np.unique(batch["weights"][batch["weights"] > 0]).tolist() == [0.25]  # one loss over four labels


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"labels": [1]}, "expected 'labels' to be a list of 2 labels, got 1 labels"),
        ({"labels": "+-"}, r"expected 'labels' to be a list of 2 labels, got '\+-'"),
        ({"labels": [1, "good"]}, r"expected 'labels'\[1\] to be null or a number, got 'good'; or set classes"),
        ({"labels": [None, None]}, "no step has a label"),
        ({"completions": ["a", 2]}, "expected 'completions' to be a list of texts, or a text"),
        ({"completions": None}, "expected 'completions' to be a list of texts, or a text, got None"),
    ],
)
def test_steps_without_fitting_labels_are_refused(tmp_path, changes, error):
    record = {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0], **changes}
    files = json_lines(tmp_path / "a.jsonl", record)
    with pytest.raises(InputError, match=f"line 1: {error}"):
        LabelledLines.Config(files=files, tokenizer=BYTES, example=StepLabels.Config()).build()


def test_preferences_share_a_prompt_and_resume_to_the_bit(tmp_path):
    record = {"prompt": "1+1", "chosen": "2", "rejected": "33", "by": 0.25}
    files = json_lines(tmp_path / "a.jsonl", *[record] * 5)
    source = LabelledLines.Config(files=files, tokenizer=BYTES, example=Preference.Config(margin="by"))
    example = source.build()[0]
    starts = np.nonzero(example["positions"] == 0)[0]
    texts = [bytes(t for t in part.tolist() if t < 256) for part in np.split(example["tokens"], starts[1:])]
    assert texts == [b"1+1\n2", b"1+1\n33"] and example["labels"][-1] == 0.25
    cfg = LabelledInput.Config(source=source, seq_len=32, batch_size=2)
    first = cfg.build()
    next(first)
    second = cfg.build()
    second.restore(first.state())
    a, b = next(first), next(second)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    first.close()
    second.close()
