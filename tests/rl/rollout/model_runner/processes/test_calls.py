"""The messages in which a leader sends calls to its remote_runners: what is sent is what arrives."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from rl.rollout.model_runner.batches import DecodeLayout, PrefillBatch, pack_decode
from rl.rollout.model_runner.processes.calls import RunnerCall, from_message, to_message
from rl.rollout.sampling import Sampler

RULES = Sampler.Config(temperature=0.5, top_k=7, repetition_penalty=1.5, logit_bias=((3, 2.0),))


def sent(call: RunnerCall) -> RunnerCall:
    """Return a call as it arrives."""
    fields, arrays = to_message(call)
    return from_message(json.loads(json.dumps(fields)), bytearray(b"".join(array.tobytes() for array in arrays)))


def prefill() -> PrefillBatch:
    rng = np.random.default_rng(0)
    sizes: list[Any] = [(2, 8), 2, 2, (2, 3)]
    return PrefillBatch(*(rng.integers(0, 99, size).astype(np.int32) for size in sizes))


@pytest.mark.parametrize(
    "call",
    [
        RunnerCall("prefill", (prefill(),)),
        RunnerCall(
            "decode",
            (pack_decode([], [Sampler.Config()] * 3, DecodeLayout(pages=5, vocab=11)),),
            {"min_alive_rows": 2, "plain": True},
        ),
        RunnerCall(
            "decode",
            (pack_decode([], [Sampler.Config(), RULES], DecodeLayout(pages=5, vocab=11)),),
            {"min_alive_rows": 1, "plain": False},
        ),
        RunnerCall("copy", tuple(np.array([(1, 2), (3, 4)], np.int32).T)),  # columns: not contiguous
        RunnerCall("zero", (np.zeros(0, np.int32),)),
        RunnerCall("install", options={"key": 7}),
        RunnerCall("sleep"),
    ],
    ids=lambda call: call.name,
)
def test_what_is_sent_is_what_arrives(call: RunnerCall) -> None:
    found = sent(call)
    assert (found.name, found.options) == (call.name, call.options)
    assert jax.tree.structure(found.arguments) == jax.tree.structure(call.arguments)
    for ours, theirs in zip(jax.tree.leaves(found.arguments), jax.tree.leaves(call.arguments), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_no_call_is_an_error() -> None:
    fields, arrays = to_message(RunnerCall("zero", (np.arange(4, dtype=np.int32),)))
    with pytest.raises(ValueError, match="buffer"):
        from_message(fields, bytearray(arrays[0].tobytes()[:-1]))
    with pytest.raises(ValueError, match="[Tt]oo many|expected"):
        from_message({**fields, "call": "install"}, bytearray(arrays[0].tobytes()))
