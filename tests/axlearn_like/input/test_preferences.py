"""Preferences in files, as texts and as conversations, and the batches that are made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.input import (
    InputError,
    LabelledLines,
    OneARow,
    Preference,
    PreferenceInput,
    UnpairedInput,
    UnpairedPreference,
    preference,
)
from tests.axlearn_like.input.data import BYTES, json_lines
from tests.axlearn_like.input.test_chat import tokenizer
from tests.axlearn_like.training.alignment.judged import COUNT, Judged, Pairs, batch_of


def completions(example: dict[str, np.ndarray], prefix: str = "") -> dict[int, bytes]:
    """The texts on each side of an example, whose end tokens are no text."""
    sides = example[f"{prefix}sides"]
    return {side: bytes(t for t in example[f"{prefix}tokens"][sides == side].tolist() if t < 256) for side in (1, -1)}


def test_completions_are_marked_with_their_ends_and_prompts_are_not(tmp_path: Path) -> None:
    record = {"prompt": "1+1", "chosen": "2", "rejected": "33"}
    example = LabelledLines.Config(
        files=json_lines(tmp_path / "a.jsonl", record), tokenizer=BYTES, example=Preference.Config()
    ).build()[0]
    assert completions(example) == {1: b"2", -1: b"33"}
    eos, marked = BYTES.build().eos, example["tokens"][example["sides"] != 0]
    assert np.count_nonzero(marked == eos) == 2 and marked[-1] == eos  # an end is drawn, too


@pytest.mark.numerics
def test_a_target_has_the_side_of_the_token_that_it_is() -> None:
    batch, source = batch_of(Pairs.Config()), Pairs.Config().build()
    assert {"sides", "weights"} <= batch.keys() and batch["targets"].dtype == np.int32
    np.testing.assert_allclose(batch["weights"][batch["weights"] > 0], 1 / COUNT)
    seen = set()
    for row in range(COUNT):
        chosen, rejected = (tuple(batch["targets"][row][batch["sides"][row] == side].tolist()) for side in (1, -1))
        seen.add((chosen, rejected))
        assert batch["segment_ids"][row].max() == 2
    assert seen == {tuple(tuple(side.tokens.tolist()) for side in pair) for pair in source.pairs}


def test_a_mismatched_completion_lies_where_the_matched_one_does() -> None:
    batch, source = batch_of(Judged.Config(), UnpairedInput), Judged.Config().build()
    for row in range(COUNT):
        live, others = batch["sides"][row] != 0, batch["other_sides"][row] != 0
        own, other = tuple(batch["targets"][row][live]), tuple(batch["other_targets"][row][others])
        (index,) = (i for i, pair in enumerate(source.pairs) if tuple(pair[0].tokens) == own)
        assert other == tuple(source.pairs[(index + 1) % COUNT][0].tokens)
        assert set(batch["sides"][row][live]) == {1 if index % 3 == 0 else -1}
        prompt = source.pairs[index][0].prompt
        np.testing.assert_array_equal(batch["other_tokens"][row][: len(prompt)], prompt)
        assert batch["segment_ids"][row].max() == 1


def test_conversations_share_what_both_begin_with(tmp_path: Path) -> None:
    """Earlier turns of the assistant are part of the prompt; a prompt beside whole conversations is not needed."""
    built = tokenizer("qwen25").build()
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    said += [{"role": "user", "content": "Sure?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("Yes.", "No, 33.")]

    def example(record: dict[str, Any]) -> dict[str, np.ndarray]:
        return Preference.Config().build(tokenizer=built).encode(record, "line 1")

    whole = example({"prompt": "1+1?", "chosen": said + answers[0], "rejected": said + answers[1]})
    apart = example({"prompt": said, "chosen": answers[0], "rejected": answers[1]})
    for name, array in whole.items():
        np.testing.assert_array_equal(array, apart[name])
    for side, text in ((1, "Yes."), (-1, "No, 33.")):
        drawn = whole["tokens"][whole["sides"] == side].tolist()
        assert built.decode(drawn[:-1]) == text and drawn[-1] == built.eos
    with pytest.raises(InputError, match="line 1: no message"):
        example({"chosen": said + answers[0], "rejected": [*said, {"role": "user", "content": "?"}]})
    mixed = Preference.Config(prompt=None).build(tokenizer=built)
    with pytest.raises(InputError, match="line 1: expected chosen and rejected to be both texts or both messages"):
        mixed.encode({"chosen": answers[0], "rejected": "no"}, "line 1")


def unpaired_lines(path: Path, *records: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    files = json_lines(path / "a.jsonl", *records)
    source = LabelledLines.Config(files=files, tokenizer=BYTES, example=UnpairedPreference.Config()).build()
    return [source[i] for i in range(len(source))]


def test_completions_are_mismatched_with_another_prompt_however_records_are_ordered(tmp_path: Path) -> None:
    """Records of one prompt follow each other, as where pairs were taken apart; most are of prompt a."""
    prompts = "aaaaabbc"
    records = [{"prompt": p, "completion": f"{p}{i}", "label": i % 2 == 0} for i, p in enumerate(prompts)]
    for record, example in zip(records, unpaired_lines(tmp_path, *records), strict=True):
        side = 1 if record["label"] else -1
        assert completions(example)[side] == record["completion"].encode() and completions(example)[-side] == b""
        assert completions(example, "other_")[1].decode()[0] != record["prompt"]
    with pytest.raises(InputError, match="records of two prompts or more"):
        unpaired_lines(tmp_path, *records[:3])
    with pytest.raises(InputError, match=r"line 2: expected 'label' to be true or false, got 2"):
        unpaired_lines(tmp_path, records[0], {**records[-1], "label": 2})


def test_what_cannot_be_trained_on_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    pairs: dict[str, Any] = {"seq_len": 16, "batch_size": 2, "rows": OneARow.Config()}
    record = {"prompt": "1", "chosen": "2", "rejected": "3" * 20}
    lines = LabelledLines.Config(
        files=json_lines(tmp_path / "a.jsonl", {**record, "rejected": "3"}, record),
        tokenizer=BYTES,
        example=Preference.Config(),
    )
    with pytest.raises(InputError, match=r"a\.jsonl, line 2 has \d+ tokens and needs rows of \d+, but seq_len is 16"):
        PreferenceInput.Config(source=lines, **pairs).build()
    with pytest.raises(InputError, match="expected pairs with their completions marked"):
        PreferenceInput.Config(source=Judged.Config(), **pairs).build()
    with pytest.raises(InputError, match="expected single completions that are good or bad"):
        UnpairedInput.Config(source=Pairs.Config(), **pairs).build()
    with pytest.raises(ConfigError, match="long: expected refuse"):
        PreferenceInput.Config(source=Pairs.Config(), long="split", **pairs).check()
    assert "sides" not in preference([1, 2], [3])  # a reward model's
