"""The same global batches to the bit, wherever training was interrupted and on however many processes it goes on."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigBase
from axlearn_like.input import FirstFit, Mixture, OneARow, Part, Stage, SupervisedInput
from tests.axlearn_like.input.data import Numbered

ROWS = 12  # divides over 1, 2, 3, 4 processes

one = Numbered.Config(examples=19)
several = Mixture.Config(
    parts=(
        Part.Config(name="a", source=Numbered.Config(examples=7), weight=0.3),
        Part.Config(name="b", source=Numbered.Config(examples=30, base=100, max_length=40), weight=0.7),
        Part.Config(name="c", source=Numbered.Config(examples=1, base=200), weight=0.05),
    ),
    stages=(Stage.Config(until=33, weights={"a": 1}), Stage.Config(until=90, weights={"b": 1, "c": 1})),
)


def config(source: ConfigBase, rows: ConfigBase, prefetch: int) -> SupervisedInput.Config:
    return SupervisedInput.Config(
        source=source, seq_len=10, batch_size=ROWS, rows=rows, long="split", prefetch=prefetch, seed=5
    )


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    source=st.sampled_from([one, several]),
    rows=st.sampled_from(
        [
            FirstFit.Config(window=11),
            FirstFit.Config(window=200),
            OneARow.Config(),
        ]
    ),
    # The numbers of processes of each session, and how many steps it lives.
    sessions=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 4)), min_size=2, max_size=6),
    prefetch=st.sampled_from([0, 2]),
)
def test_any_interruptions_and_numbers_of_processes(source, rows, sessions, prefetch):
    uninterrupted = config(source, rows, 0).build()
    state = ""
    for processes, steps in sessions:
        each = ROWS // processes
        own = [range(p * each, (p + 1) * each) for p in range(processes)]
        parts = [config(source, rows, prefetch).build(rows=some) for some in own]
        for part in parts if state else []:
            part.restore(json.loads(state))
        for _ in range(steps):
            batches = [next(part) for part in parts]
            whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
            assert_same(whole, next(uninterrupted))
            assert all(part.metrics() == uninterrupted.metrics() for part in parts)
        (state,) = {json.dumps(part.state(), sort_keys=True) for part in parts}  # one for all processes
        assert json.loads(state) == uninterrupted.state()
        for part in parts:
            part.close()


def test_every_step_can_be_resumed_from():
    data = config(several, FirstFit.Config(window=40), 0).build()
    states, batches = [], []
    for _ in range(15):
        states.append(data.state())
        batches.append(next(data))
    for step, state in enumerate(states):
        rows = np.arange(step % 3, ROWS, 3)  # of a process with devices here and there
        resumed = config(several, FirstFit.Config(window=40), 0).build(rows=rows)
        resumed.restore(state)
        assert_same({name: x[rows] for name, x in batches[step].items()}, next(resumed))


def test_a_process_reads_only_its_own_rows():
    """An index of lengths is needed: else reading an example is the only way to know its length."""

    class Indexed:
        digest, longest = "x", (4, "")

        def __init__(self):
            self.read_examples: list[int] = []

        def __len__(self) -> int:
            return 32

        def lengths(self, indices):
            return np.full(len(indices), 4)

        def learned(self, indices, starts, stops):
            return stops - starts

        def read(self, index, start, stop):
            self.read_examples.append(index)
            return np.full(stop - start, index, np.int32), np.ones(stop - start, bool)

    from axlearn_like.input.batches import BatchStream
    from axlearn_like.input.mixture import Single

    seen = []
    for process in range(4):
        source = Indexed()
        each = np.array([process, process + 4])
        stream = BatchStream(
            Single(source, "x"),
            FirstFit.Config().build(),
            seq_len=6,
            batch_size=8,
            long="refuse",
            seed=0,
            rows=each,
        )
        batch = next(stream)
        assert len(source.read_examples) == 4  # two rows of two examples
        np.testing.assert_array_equal(batch.arrays["weights"], np.full((2, 6), np.float32(1) / np.float32(48)))
        seen += source.read_examples
    assert len(set(seen)) == 16
