"""Drafts and shared keys change no token; the studies count their work."""

import jax
import jax.numpy as jnp
import pytest

from tests.studies import cascade, speculation
from tests.studies.bed import Compilations


@pytest.mark.full
def test_drafts_change_no_token() -> None:
    found = speculation.measure(quick=True)["speculation"]
    assert found["identical_tokens"] and found["cpu_ratio"] > 0 and 0 <= found["acceptance"] <= 1


@pytest.mark.full
def test_shared_keys_change_no_token_and_are_read_once() -> None:
    (job,) = cascade.measure(quick=True)["cascade"]["jobs"]
    assert job["identical"] and job["bytes_ratio"] < 1


def test_compilations_of_anything_are_counted_once() -> None:
    double = jax.jit(lambda x: x * 2 + 0.125)
    count = Compilations()
    value = jnp.arange(3.0)
    before = count.count
    double(value)
    assert count.count == before + 1
    double(value)
    assert count.count == before + 1
