"""Requests of models as records of the journal, and back.

Every record has a `kind`. Those of a request of a model have its `tenant`, `model` and number `seq`; the creation of a
model is number 0. Other kinds: `outcome` is the result of a request that saves or loads; `end` and `gone` say that the
end of a model was accepted, and has come; `sampler` and `closed` that a sampler was opened, and closed.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from rl.serving.service.durable.journal import JournalRecord
from rl.serving.service.messages import (
    AdamParams,
    CreateModel,
    Datum,
    LoadState,
    LoraSpec,
    OpenSampler,
    Refusal,
    Request,
    SaveState,
    TrainPass,
)

REQUESTS: dict[str, type[Request]] = {
    "create": CreateModel,
    "pass": TrainPass,
    "step": AdamParams,
    "save": SaveState,
    "load": LoadState,
    "sampler_of": OpenSampler,
    "refuse": Refusal,
}


def make_record(kind: Literal["outcome", "end", "gone", "sampler", "closed"], **fields: Any) -> JournalRecord:
    """Return a record of plain values."""
    return JournalRecord({"kind": kind, **fields})


def request_record(tenant: str, model: str, seq: int, request: Request) -> JournalRecord:
    """Return the record of a request."""
    arrays: dict[str, np.ndarray] = {}
    if isinstance(request, TrainPass):
        content: Any = {"loss": request.loss, "config": dict(request.config), "forward_only": request.forward_only}
        for number, row in enumerate(request.rows):
            arrays |= {f"{number} {name}": array for name, array in (("", row.tokens), *row.inputs.items())}
    else:
        content = dataclasses.asdict(request)
    kind = next(kind for kind, cls in REQUESTS.items() if isinstance(request, cls))
    return JournalRecord({"kind": kind, "tenant": tenant, "model": model, "seq": seq, "request": content}, arrays)


def recorded_request(record: JournalRecord) -> Request:
    """Return the request of a record."""
    fields, content = record.fields, record.fields["request"]
    if fields["kind"] == "create":
        return CreateModel(**{**content, "spec": LoraSpec(**content["spec"])})
    if fields["kind"] != "pass":
        return REQUESTS[fields["kind"]](**content)
    rows: dict[str, dict[str, np.ndarray]] = {}
    for key, array in record.arrays.items():
        number, _, name = key.partition(" ")
        rows.setdefault(number, {})[name] = array
    return TrainPass(fields["model"], tuple(Datum(row.pop(""), row) for row in rows.values()), **content)
