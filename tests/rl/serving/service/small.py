"""Training slots of a model of a few thousand parameters, and rows for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.serving.service.losses import LOSSES
from rl.serving.service.messages import Datum, LossName, TrainPass
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.saved import SlotState
from rl.serving.service.slots import TrainingSlots
from tests.rl.tiny import tiny_params, tiny_policy

POLICY = tiny_policy(num_layers=2)
VOCAB = 272
LIMITS = SlotLimits(slots=3, rank=4, context_length=32, tokens=64, shortest=16)  # rows of 16 and of 32 tokens


def make_slots(**changes: Any) -> TrainingSlots:
    """Return slots of the small policy; `changes` are fields of their limits."""
    limits = SlotLimits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}, **changes})
    return TrainingSlots(POLICY, tiny_params(POLICY), limits)


def make_datum(rng: np.random.Generator, length: int, loss: LossName = "cross_entropy") -> Datum:
    """Return a row of random tokens with the inputs of a loss; a third of it is a prompt."""
    drawn = np.arange(length) >= length // 3
    inputs = {
        "weights": drawn * rng.uniform(0.2, 1.0, length),
        "logprobs": drawn * -rng.exponential(4.0, length),
        "advantages": drawn * rng.standard_normal(),
    }
    own = {name: inputs[name].astype(np.float32) for name in LOSSES[loss].inputs}
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    return Datum(tokens, {"target_tokens": rng.integers(0, VOCAB, length), **own})


def make_pass(model: str, rows: Sequence[Datum], loss: LossName = "cross_entropy", **changes: Any) -> TrainPass:
    """Return a pass with gradients and the default numbers of its loss; `changes` are fields of it."""
    return TrainPass(
        **{"model": model, "rows": tuple(rows), "loss": loss, "config": {}, "forward_only": False, **changes}
    )


def assert_same_state(found: SlotState, expected: SlotState) -> None:
    """Compare two states to the bit."""
    assert (found.spec, found.step) == (expected.spec, expected.step)
    for name in ("factors", "first", "second", "gradients"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        for path in other or {}:
            for a, b in zip(one[path], other[path], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{name} of {path}")
