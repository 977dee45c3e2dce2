"""Accepted requests as records of the journal, and back.

Every record has a `kind`. Those of a request of a model have its `tenant`, `model` and number `seq`; the creation of a
model is number 0.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rl.serving.service.durable.journal import JournalRecord
from rl.serving.service.messages import Datum, LoraSpec, LossName
from rl.serving.service.scheduler import TrainPass

Kind = Literal[
    "create", "create_from", "pass", "step", "save", "load", "sampler_of", "refuse",  # requests of a model
    "outcome",  # result of a request that saves or loads
    "end", "gone",  # the end of a model was accepted, and has come
    "sampler", "closed",  # a sampler was opened, and closed
]  # fmt: skip
OF_MODELS: tuple[Kind, ...] = ("create", "create_from", "pass", "step", "save", "load", "sampler_of", "refuse")


def make_record(kind: Kind, arrays: Mapping[str, np.ndarray] | None = None, /, **fields: Any) -> JournalRecord:
    """Return a record of plain values."""
    return JournalRecord({"kind": kind, **fields}, arrays or {})


def pass_record(tenant: str, seq: int, work: TrainPass) -> JournalRecord:
    """Return the record of a pass."""
    shapes: dict[str, list[list[Any]]] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for number, row in enumerate(work.rows):
        for name, array in (("", row.tokens), *row.inputs.items()):
            column = f"{array.dtype.str} {name}"
            shapes.setdefault(column, []).append([number, *array.shape])
            parts.setdefault(column, []).append(np.ravel(array))
    return make_record(
        "pass",
        {column: np.concatenate(arrays) for column, arrays in parts.items()},
        tenant=tenant,
        model=work.model,
        seq=seq,
        rows=len(work.rows),
        shapes=shapes,
        loss=work.loss,
        config=dict(work.config),
        forward_only=work.forward_only,
    )


def recorded_pass(record: JournalRecord) -> TrainPass:
    """Return the pass of a record."""
    fields = record.fields
    rows: list[dict[str, np.ndarray]] = [{} for _ in range(fields["rows"])]
    for column, shapes in fields["shapes"].items():
        name, at = column.partition(" ")[2], 0
        for number, *shape in shapes:
            size = int(np.prod(shape, dtype=np.int64))
            rows[number][name] = record.arrays[column][at : at + size].reshape(shape)
            at += size
    loss: LossName = fields["loss"]
    data = tuple(Datum(row.pop(""), row) for row in rows)
    return TrainPass(fields["model"], data, loss, fields["config"], fields["forward_only"])


def spec_fields(spec: LoraSpec) -> dict[str, Any]:
    """Return an adapter's description as plain values."""
    return dataclasses.asdict(spec)
