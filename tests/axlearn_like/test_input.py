import itertools
import json

import numpy as np
import pytest

from axlearn_like.input import InputError, SupervisedInput
from tests.axlearn_like.tiny import Counting


def make(**changes) -> SupervisedInput:
    cfg = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=4, seed=1)
    return cfg.set(**changes).build()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype


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
    _, index, _, length, *_ = str(error.value).split()
    assert lengths[int(index)] == int(length) > 9


def test_settings_and_sources_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="seq_len=0"):
        make(seq_len=0)
    with pytest.raises(InputError, match="Counting has no examples"):
        make(source=Counting.Config(examples=0))
