"""Engines of several whole models as one: each request is drawn by the weights that it names."""

import dataclasses

import numpy as np
import pytest

from axlearn_like.layers.base import Params
from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.runtime.policies.whole_models import WholeModels
from tests.rl.rollout.small import assert_same, drain, make_engine, params, request

SEEDS = {("a", 5): 1, ("b", 5): 2, ("a", 6): 3}


@pytest.fixture(scope="module")
def engines() -> list[RolloutEngine]:
    return [make_engine() for _ in range(3)]


def weights(name: str, version: int) -> Params:
    return params(SEEDS[name, version])


def named(name: str, numbers: range) -> list[Request]:
    return [dataclasses.replace(request(number), adapter=name) for number in numbers]


def loaded(models: WholeModels, name: str, version: int) -> None:
    models.load_adapter(name, models.engines[0].place(weights(name, version)), version)


@pytest.mark.slow
def test_each_request_is_drawn_by_the_model_that_it_names(engines: list[RolloutEngine]):
    models, plain = WholeModels(engines[:2]), engines[2]
    loaded(models, "a", 5)
    loaded(models, "b", 5)
    models.unload_adapter("a")
    loaded(models, "a", 6)
    asked = [one for pair in zip(named("a", range(3)), named("b", range(3, 6)), strict=True) for one in pair]
    numbers = [models.submit(one) for one in asked]
    assert numbers == list(range(6)) and models.busy and models.unfinished
    found = drain(models)
    assert not models.unfinished and sorted(found) == numbers
    for name, version in (("a", 6), ("b", 5)):
        own = [number for number, one in zip(numbers, asked, strict=True) if one.adapter == name]
        plain.invalidate_weights()
        plain.set_weights(weights(name, version), version, rewind=True)
        expected = plain.generate([dataclasses.replace(asked[number], adapter=None) for number in own])
        assert_same([rollout for number in own for rollout in found[number].rollouts], expected)
    assert len({one.tokens.tobytes() for output in found.values() for one in output.rollouts}) > 6


def test_an_engine_is_free_when_its_model_has_no_requests(engines: list[RolloutEngine]):
    models = WholeModels(engines[:1])
    loaded(models, "a", 5)
    with pytest.raises(UserError, match="b: all 1 engines have a model; unload one first"):
        loaded(models, "b", 5)
    number, other = (models.submit(one) for one in named("a", range(2)))
    with pytest.raises(UserError, match="a cannot be unloaded: requests of it are unfinished"):
        models.unload_adapter("a")
    models.abort(number)
    models.abort(number)
    outputs = {one.number: one for one in models.abort_all()}
    assert set(outputs) == {number, other}
    assert all(rollout.finish_reason == "abort" for one in outputs.values() for rollout in one.rollouts)
    models.unload_adapter("a")
    loaded(models, "b", 5)
    assert list(models.adapters) == ["b"] and not models.busy
    models.sleep()
    assert not models.adapters


def test_it_has_no_base(engines: list[RolloutEngine]):
    with pytest.raises(UserError, match="whole models have none"):
        WholeModels(engines).set_weights({"w": np.zeros(1)}, 3)
