"""The host's part of a step depends on the number of arrays, not of layers."""

import dataclasses

import pytest

from tests.peers.train_job import QUICK
from tests.studies import dispatch


@pytest.mark.full
@pytest.mark.parametrize("layers", [2, 5])
def test_dispatch_is_of_as_many_arrays_whatever_the_number_of_layers(layers: int) -> None:
    figures = dispatch.measure(dataclasses.replace(QUICK, layers=layers), calls=2)
    assert figures["arrays"] == 3 * 12 + 4  # parameters and two moments; optax's count, ours, applied and skipped
    assert 0 < figures["lowest"] <= figures["median"] and figures["nothing"] > 0 and figures["batch"] > 0
