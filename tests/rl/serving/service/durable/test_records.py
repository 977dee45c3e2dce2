"""A pass comes back from the journal to the bit, whatever its rows hold."""

from pathlib import Path

import numpy as np

from rl.serving.service.durable.journal import RequestJournal
from rl.serving.service.durable.records import recorded_request, request_record
from rl.serving.service.messages import (
    AdamParams,
    CreateModel,
    Datum,
    LoadState,
    LoraSpec,
    OpenSampler,
    Refusal,
    SaveState,
    TrainPass,
)


def test_rows_of_any_inputs_come_back(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = tuple(
        Datum(
            rng.integers(0, 99, length).astype(np.int32),
            {
                "target_tokens": rng.integers(0, 99, length),
                **(
                    {"weights": rng.random(length, np.float32)} if length % 2 else {"advantages": np.full((2, 3), -0.0)}
                ),
            },
        )
        for length in (3, 1, 4, 0, 5)
    )
    given = TrainPass("s:train:0", rows, "ppo", {"clip_low_threshold": 0.1 + 0.2}, True)
    journal = RequestJournal(tmp_path / "journal")
    journal.append(request_record("me", given.model, 7, given))
    journal.close()
    (record,) = RequestJournal(tmp_path / "journal").take_found()
    found = recorded_request(record)
    assert isinstance(found, TrainPass)
    assert (found.model, found.loss, found.config, found.forward_only) == (
        given.model, given.loss, given.config, given.forward_only
    )  # fmt: skip
    assert (record.fields["tenant"], record.fields["seq"], found.tokens) == ("me", 7, 13)
    for a, b in zip(found.rows, rows, strict=True):
        for x, y in zip((a.tokens, *a.inputs.values()), (b.tokens, *b.inputs.values()), strict=True):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        assert list(a.inputs) == list(b.inputs)


def test_other_requests_come_back_as_they_were(tmp_path: Path):
    given = [
        CreateModel(LoraSpec(3, seed=9, train_mlp=False), "tinker://s:train:1/weights/x", True),
        AdamParams(1e-3, grad_clip_norm=2.0),
        SaveState("a", "sampler_weights", True),
        LoadState("tinker://s:train:1/weights/x", False),
        OpenSampler("s:sample:0"),
        Refusal("it was wrong", "server"),
    ]
    journal = RequestJournal(tmp_path / "journal")
    for seq, request in enumerate(given):
        journal.append(request_record("me", "s:train:0", seq, request))
    journal.close()
    assert [recorded_request(record) for record in RequestJournal(tmp_path / "journal").take_found()] == given
