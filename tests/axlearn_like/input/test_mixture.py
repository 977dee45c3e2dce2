"""Mixtures: fractions exact to one example, epochs of their own, and settings that are refused."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigBase, ConfigError, Configurable
from axlearn_like.input import InputError, Mixture, Part, Stage, SupervisedInput
from tests.axlearn_like.input.data import Numbered

weights = st.lists(st.floats(0, 8).map(lambda x: round(x, 3)), min_size=1, max_size=6).filter(any)


class NeverBuilt(Configurable):
    """A source that is expensive to build."""

    class Config(ConfigBase["NeverBuilt"]):
        pass

    def __init__(self, cfg: Config):
        raise AssertionError("built before the settings were looked at")


def mixture(values, stages=()) -> Mixture:
    parts = [Part.Config(name=f"s{i}", source=Numbered.Config(base=100 * i), weight=w) for i, w in enumerate(values)]
    return Mixture.Config(parts=tuple(parts), stages=tuple(stages)).build()


def counts(sources, n):
    return np.stack([np.cumsum(sources == i) for i in range(n)], axis=1)


@settings(deadline=None)
@given(weights, st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_fractions_are_within_one_example_at_every_moment(values, calls):
    mix, drawn = mixture(values), None
    drawn, found = mix.begin(), []
    for count in calls:
        sources, _, drawn = mix.draw(drawn, count)
        found.append(sources)
    total = sum(Fraction(repr(w)) for w in values)
    for n, have in enumerate(counts(np.concatenate(found), len(values)), start=1):
        for count, weight in zip(have.tolist(), values, strict=True):
            assert abs(count - n * Fraction(repr(weight)) / total) < 1
    assert drawn.ever == tuple(have.tolist())
    whole, _, _ = mix.draw(mix.begin(), sum(calls))
    np.testing.assert_array_equal(whole, np.concatenate(found))


def test_weights_change_after_so_many_examples():
    stages = [Stage.Config(until=10, weights={"s0": 1}), Stage.Config(until=30, weights={"s0": 1, "s1": 3})]
    mix = mixture([0, 0.5, 0.5], stages)
    sources, ordinals, _ = mix.draw(mix.begin(), 70)
    assert (sources[:10] == 0).all()
    assert np.bincount(sources[10:30], minlength=3).tolist() == [5, 15, 0]
    assert np.bincount(sources[30:], minlength=3).tolist() == [0, 20, 20]
    for i in range(3):  # a source goes on where it was
        assert ordinals[sources == i].tolist() == list(range((sources == i).sum()))
    first, _, drawn = mix.draw(mix.begin(), 10)
    later, _, drawn = mix.draw(drawn, 20)
    last, _, _ = mix.draw(drawn, 40)
    np.testing.assert_array_equal(np.concatenate([first, later, last]), sources)


def test_each_source_has_epochs_and_orders_of_its_own():
    parts = (
        Part.Config(name="small", source=Numbered.Config(examples=5), weight=1),
        Part.Config(name="large", source=Numbered.Config(examples=40, base=100), weight=2),
    )
    cfg = SupervisedInput.Config(source=Mixture.Config(parts=parts), seq_len=9, batch_size=1)
    cfg.rows = cfg.rows.clone(window=30)
    data = cfg.build()
    seen: dict[str, list[int]] = {"small": [], "large": []}
    metrics = {}
    while len(seen["large"]) < 120:
        batch = next(data)
        tokens, segments = batch["tokens"][0], batch["segment_ids"][0]
        for segment in range(1, segments.max() + 1):
            token = int(tokens[segments == segment][0])
            seen["large" if token >= 100 else "small"].append(token)
        metrics = data.metrics()
    # 4 windows of 30: 20 of the large one each, so its epochs end with every second window.
    epochs = [seen["large"][i : i + 40] for i in (0, 40, 80)]
    assert all(sorted(epoch) == list(range(100, 140)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert np.bincount(seen["small"][:50]).tolist() == [10] * 5
    assert metrics.keys() == {"packing", "epoch/small", "epoch/large"}
    assert metrics["epoch/large"] == 2.5 and metrics["epoch/small"] == 10


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1, -0.5], "Mixture.Config.parts: the weight of 's1' is -0.5; expected a finite number >= 0"),
        ([0, 0], r"the weights of all parts \(s0, s1\) are 0"),
        ([float("nan")], "the weight of 's0' is nan"),
        ([float("inf")], "the weight of 's0' is inf"),
    ],
)
def test_weights_that_make_no_sense_are_refused_before_a_source_is_built(values, says):
    parts = [Part.Config(name=f"s{i}", source=NeverBuilt.Config(), weight=w) for i, w in enumerate(values)]
    with pytest.raises(InputError, match=says):
        SupervisedInput.Config(source=Mixture.Config(parts=tuple(parts)), seq_len=8, batch_size=1).build()


def test_names_and_stages_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match=r"stages.0.weights: no part is called 's7'; known: s0, s1"):
        mixture([1, 1], [Stage.Config(until=3, weights={"s7": 1})])
    with pytest.raises(ConfigError, match="stages: expected rising values of `until`, above 0"):
        mixture([1], [Stage.Config(until=5, weights={"s0": 1})] * 2)
    with pytest.raises(InputError, match="stages.0.weights: the weights of all parts"):
        mixture([1], [Stage.Config(until=5, weights={"s0": 0})])
    part = Part.Config(name="a", source=NeverBuilt.Config())
    with pytest.raises(ConfigError, match="Mixture.parts: expected parts of different names"):
        Mixture.Config(parts=(part, part.clone())).build()
    with pytest.raises(ConfigError, match="Mixture.parts: expected parts of different names"):
        Mixture.Config(parts=()).build()
    with pytest.raises(InputError, match="source a has no examples"):
        Mixture.Config(parts=(Part.Config(name="a", source=Numbered.Config(examples=0)),)).build()
    nested = Mixture.Config(parts=(Part.Config(name="b", source=Numbered.Config()),))
    with pytest.raises(InputError, match="source a: Mixture is not a source of examples"):
        Mixture.Config(parts=(Part.Config(name="a", source=nested),)).build()
