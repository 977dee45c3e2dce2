"""A call of the model runner as a message: a name, small numpy arrays, and options."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rl.rollout.model_runner.batches import DecodeBatch, PrefillBatch
from rl.rollout.sampling import SamplingMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerCall:
    """A method of the model runner, or of the remote runner, with its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()  # numpy arrays and dataclasses of them, of the types in `_ARGUMENTS`
    options: Mapping[str, int | None] = dataclasses.field(default_factory=dict[str, int | None])  # numbers by name


_ARRAY = 0  # stands for any array
_SAMPLING = SamplingMetadata(*[_ARRAY] * len(dataclasses.fields(SamplingMetadata)))  # pyright: ignore
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "prefill": (PrefillBatch(*[_ARRAY] * 6),),
    "decode": (DecodeBatch(*[_ARRAY] * 7, _SAMPLING, *[_ARRAY] * 9),),  # pyright: ignore
    "redraw": (DecodeBatch(*[_ARRAY] * 7, _SAMPLING, *[_ARRAY] * 9),),  # pyright: ignore
    "copy": (_ARRAY, _ARRAY),
    "zero": (_ARRAY,),
}
_STRUCTURES = {name: jax.tree.structure(arguments) for name, arguments in _ARGUMENTS.items()}
_EMPTY = jax.tree.structure(())


def to_message(call: RunnerCall) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a call as fields that JSON can hold, and the arrays whose bytes follow them, one after the other.

    Arrays of one byte an element are the last of a batch, so that all others are aligned where they arrive.
    """
    leaves = jax.tree.leaves(call.arguments, is_leaf=lambda leaf: leaf is None)
    arrays = [np.ascontiguousarray(leaf) for leaf in leaves if leaf is not None]
    shapes = [None if leaf is None else (leaf.dtype.str, leaf.shape) for leaf in leaves]
    return {"call": call.name, "arrays": shapes, "options": dict(call.options)}, arrays


def from_message(fields: Mapping[str, Any], body: bytearray) -> RunnerCall:
    """Return the call of a message (ValueError or KeyError: it is none)."""
    name, at = fields["call"], 0
    leaves: list[np.ndarray | None] = []
    for described in fields["arrays"]:
        if described is None:
            leaves.append(None)
            continue
        dtype, shape = np.dtype(described[0]), tuple(described[1])
        count = int(np.prod(shape, dtype=np.int64))
        leaves.append(np.frombuffer(body, dtype, count, at).reshape(shape) if count else np.zeros(shape, dtype))
        at += count * dtype.itemsize
    arguments: Sequence[Any] = jax.tree.unflatten(_STRUCTURES.get(name, _EMPTY), leaves)
    return RunnerCall(name, tuple(arguments), fields["options"])
