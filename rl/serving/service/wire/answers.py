"""Outcomes of requests as HTTP responses: JSON, and protobuf for log-probabilities and samples."""

from typing import Any

from starlette.responses import JSONResponse, Response

from rl.serving.service.messages import LossOutput, SampleOutput, ServiceError
from rl.serving.service.verbs import (
    ModelCreated,
    ModelUnloaded,
    Outcome,
    SamplerOpened,
    StateLoaded,
    StateSaved,
    StepDone,
)
from rl.serving.service.wire.protobuf import CONTENT_TYPE, ProtobufCodec

_LARGE = 1 << 20  # bytes of an answer from which a client is told the size first, since it bounds what it holds


def answer(codec: ProtobufCodec, outcome: Outcome | ServiceError, *, size_first: bool = False) -> tuple[Response, bool]:
    """Return the response, and True if it has the outcome; `size_first`: only the size if that is large."""
    if not isinstance(outcome, LossOutput | SampleOutput):
        return JSONResponse(_json(outcome)), True
    body = codec.pass_output(outcome) if isinstance(outcome, LossOutput) else codec.sample_output(outcome)
    if size_first and len(body) >= _LARGE:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(body)}), False
    return Response(body, media_type=CONTENT_TYPE), True


def _json(outcome: Any) -> dict[str, Any]:
    match outcome:
        case ServiceError():
            return {"error": str(outcome), "category": outcome.category}
        case StepDone(metrics):
            return {"type": "optim_step", "metrics": dict(metrics)}
        case StateSaved(path):
            return {"path": path}
        case StateLoaded(path):
            return {"type": "load_weights", "path": path}
        case SamplerOpened(sampler):
            return {"sampling_session_id": sampler}
        case ModelCreated(model):
            return {"type": "create_model", "model_id": model}
        case ModelUnloaded(model):
            return {"type": "unload_model", "model_id": model}
        case _:
            raise TypeError(f"no JSON of {type(outcome).__name__}")
