import itertools
import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axlearn_like.config import ConfigError, config_for
from axlearn_like.input import FirstFit, InputError, OneARow, SupervisedInput
from tests.axlearn_like.input.data import Numbered, grain_examples
from tests.axlearn_like.tiny import Counting


def make(**changes) -> SupervisedInput:
    cfg = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=4, seed=1)
    return cfg.set(**changes).build()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype


@pytest.mark.numerics
def test_batches_are_what_the_step_expects():
    for batch in itertools.islice(make(), 10):
        tokens, targets = batch["tokens"], batch["targets"]
        segments, positions, weights = batch["segment_ids"], batch["positions"], batch["weights"]
        assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(batch, (4, 16))
        assert {x.dtype.name for name, x in batch.items() if name != "weights"} == {"int32"}
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
        live = segments > 0
        np.testing.assert_array_equal(targets[live], (tokens[live] + 1) % 32)
        assert (weights[~live] == 0).all()
        assert (weights[live] > 0).all()  # only first tokens are unlearned, and they are no targets
        same = segments[:, 1:] == segments[:, :-1]
        restart = positions[:, 1:] == 0
        np.testing.assert_array_equal(
            (positions[:, 1:] == positions[:, :-1] + 1)[live[:, 1:]], (same & ~restart)[live[:, 1:]]
        )
        assert (positions[:, 0] == 0).all()


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    def examples(batches):
        for batch in batches:
            for row, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
                for segment in range(1, segments.max() + 1):
                    yield tuple(row[segments == segment])

    source = Counting.Config().build()
    expected = sorted(tuple(source[i]["tokens"][:-1]) for i in range(len(source)))
    seen = list(itertools.islice(examples(make(batch_size=1)), 3 * len(source)))
    epochs = [seen[i : i + len(source)] for i in range(0, len(seen), len(source))]
    for epoch in epochs:
        assert sorted(epoch) == expected
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides_the_order():
    first, again, other = make(), make(), make(seed=2)
    for _ in range(6):
        assert_same(next(first), next(again))
    assert not np.array_equal(next(first)["tokens"], next(other)["tokens"])


@pytest.mark.parametrize("done", [0, 1, 3, 7, 20])
def test_a_resume_in_mid_epoch_goes_on_with_the_next_batch(done):
    first = make()
    for _ in range(done):
        next(first)
    state = json.loads(json.dumps(first.state()))
    resumed = make()
    resumed.restore(state)
    for _ in range(8):
        assert_same(next(first), next(resumed))
    assert first.state() == resumed.state()


def test_an_example_that_does_not_fit_is_named():
    lengths = Counting.Config().build()._lengths
    with pytest.raises(InputError, match="tokens and needs rows of .*, but seq_len is 8") as error:
        list(itertools.islice(make(seq_len=8, batch_size=2), 30))
    found = re.match(r"example (\d+) of Counting has (\d+) tokens and needs rows of", str(error.value))
    assert found and lengths[int(found[1])] == int(found[2]) > 9


def test_long_examples_are_split_on_request():
    batches = list(itertools.islice(make(seq_len=4, long="split"), 40))
    for batch in batches:
        live = batch["segment_ids"] > 0
        np.testing.assert_array_equal(batch["targets"][live], (batch["tokens"][live] + 1) % 32)
    assert max(batch["positions"].max() for batch in batches) == 3
    # An epoch has as many targets as tokens that are not the first of their example.
    rows = [row for batch in batches for row in batch["segment_ids"]]
    per_epoch = int((Counting.Config().build()._lengths - 1).sum())
    assert per_epoch in np.cumsum([(row > 0).sum() for row in rows])


def test_unpacked_rows_hold_one_example():
    batch = next(make(rows=OneARow.Config()))
    assert (batch["segment_ids"].max(axis=1) == 1).all()
    assert (np.diff(batch["segment_ids"], axis=1) <= 0).all()


def test_the_packing_of_each_batch_is_told():
    data = make()
    for _ in range(12):
        batch = next(data)
        assert data.metrics()["packing"] == (batch["segment_ids"] > 0).mean()
    assert 0 < data.metrics()["epoch"] < 12


def test_settings_and_sources_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="seq_len: expected 1 or more, got 0"):
        make(seq_len=0)
    with pytest.raises(ConfigError, match="prefetch: expected 0 or more, got -1"):
        make(prefetch=-1)
    with pytest.raises(InputError, match="source Counting has no examples"):
        make(source=Counting.Config(examples=0))
    cfg = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=4)
    for rows in ([], [-1, 0], [3, 4], [1, 1], [2, 1]):
        with pytest.raises(InputError, match=r"rows \[.*\] of a batch; expected some of 0 to 3 .*, ascending"):
            cfg.build(rows=rows)


def test_positions_of_other_versions_data_or_settings_are_refused():
    data = make()
    next(data)
    with pytest.raises(InputError, match="written by another version"):
        data.restore({"parent": {"next_index": 4}, "next_index": 1})  # as Grain's packer wrote it
    with pytest.raises(InputError, match="seq_len was 16 and is 20"):
        make(seq_len=20).restore(data.state())
    with pytest.raises(InputError, match="data of Counting was 'Counting of 23 examples' and is 'Counting of 24 ex"):
        make(source=Counting.Config(examples=24)).restore(data.state())
    with pytest.raises(InputError, match="rows was .*FirstFit.* and is .*OneARow"):
        make(rows=OneARow.Config()).restore(data.state())
    make(batch_size=2).restore(data.state())  # rows come one after the other, however many a batch has


def test_the_thread_that_makes_batches_ahead_ends():
    before = set(threading.enumerate())
    data = make(prefetch=3)
    next(data)
    assert len(set(threading.enumerate()) - before) == 1
    data.close()
    assert set(threading.enumerate()) <= before
    data = make(prefetch=3)
    next(data)
    del data
    assert set(threading.enumerate()) <= before


def test_a_dataset_of_grain_is_a_source():
    ours, grains = (make(source=source) for source in (Numbered.Config(), config_for(grain_examples, examples=17)))
    for a, b in zip(itertools.islice(ours, 12), grains, strict=False):
        assert_same(a, b)


class Prompted:
    """Examples of `given` prompt tokens and `learned` answer tokens."""

    def __init__(self, sizes: list[tuple[int, int]]):
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        given, learned = self.sizes[index]
        mask = np.arange(given + learned) >= given
        return {"tokens": np.full(given + learned, index % 50, np.int32), "loss_mask": mask}


def prompted(sizes: list[tuple[int, int]]) -> Prompted:
    return Prompted(sizes)


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 4), st.sampled_from([FirstFit, OneARow]))
def test_no_batch_is_without_a_learned_token(sizes: list[tuple[int, int]], batch_size: int, rows: Any):
    """Long prompts, cut into pieces, make pieces of which nothing is learned."""
    sizes = [(given, learned) if given + learned > 1 else (2, learned) for given, learned in sizes]
    cfg = SupervisedInput.Config(
        source=config_for(prompted, sizes=sizes),
        seq_len=6,
        batch_size=batch_size,
        long="split",
        rows=rows.Config(),
        prefetch=0,
    )
    total = sum(learned for _, learned in sizes)
    if not total:
        with pytest.raises(InputError, match="no example of prompted has a token that is learned"):
            next(cfg.build())
        return
    data, seen = cfg.build(), 0
    while data.metrics().get("epoch", 0) < 1 and seen < 200:
        batch = next(data)
        assert batch["weights"].sum() == pytest.approx(1, rel=1e-5) and np.isfinite(batch["weights"]).all()
        seen += 1
    state = data.state()
    expected = next(data)
    again = cfg.build()
    again.restore(state)
    for name, array in next(again).items():
        np.testing.assert_array_equal(array, expected[name])
