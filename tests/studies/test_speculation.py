"""Drafts and shared keys change no token; the studies count their work."""

import pytest

from tests.studies import cascade, speculation


@pytest.mark.full
def test_drafts_change_no_token() -> None:
    found = speculation.measure(quick=True)["speculation"]
    assert found["identical_tokens"] and found["cpu_ratio"] > 0 and 0 <= found["acceptance"] <= 1


@pytest.mark.full
def test_shared_keys_change_no_token_and_are_read_once() -> None:
    (job,) = cascade.measure(quick=True)["cascade"]["jobs"]
    assert job["identical"] and job["bytes_ratio"] < 1
