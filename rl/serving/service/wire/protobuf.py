"""Protobuf messages of the Tinker API: forward_backward requests in, log-probabilities and samples out.

The message classes come from the package `tinker`, whose import takes most of a second: it is made when a service
starts, not with this file.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mesh import UserError
from mesh.errors import install_hint
from rl.rollout.request import RequestOutput
from rl.serving.service.losses import MOST_TARGETS
from rl.serving.service.messages import Datum, LossName, LossOutput, ServiceError, TrainPass
from rl.serving.service.wire.requests import PromptScores

if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb

CONTENT_TYPE = "application/x-protobuf"
_NO_LOGPROB = -99999.0  # value of an empty cell of top-k log-probabilities


class ProtobufCodec:
    """Reader of requests, and writer of results."""

    def __init__(self):
        """Import the message classes; a UserError names the extra that they come with."""
        try:
            from tinker.proto import tinker_public_pb2
        except ImportError as error:
            raise UserError(f"axl service needs the package tinker ({error}); {install_hint('service')}") from error
        self._pb = tinker_public_pb2

    def request(self, raw: bytes) -> pb.ForwardBackwardRequest:
        """Return the message of a body (ServiceError: the bytes are none); its rows are not looked at."""
        from google.protobuf.message import DecodeError

        message = self._pb.ForwardBackwardRequest()
        try:
            message.ParseFromString(raw)
        except DecodeError as error:
            said = f"forward_backward: the body is no protobuf message ForwardBackwardRequest: {error}"
            raise ServiceError(said) from None
        return message

    def content(self, message: pb.ForwardBackwardRequest, model: str) -> TrainPass:
        """Return what a message asks for (ServiceError: bytes are no array; names them. Contents are not checked)."""
        rows = tuple(self._datum(datum, f"datum {index}") for index, datum in enumerate(message.data))
        config: dict[str, Any] = dict(message.loss_fn_config)  # settings of older clients
        for name, value in message.loss_fn_config_v2.items():
            config[name] = value.number if value.WhichOneof("value") == "number" else value.text
        return TrainPass(model, rows, cast(LossName, message.loss_fn), config, message.forward_only)

    def _datum(self, datum: pb.Datum, where: str) -> Datum:
        parts = [np.zeros(0, np.int32)]
        for index, chunk in enumerate(datum.model_input):
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise ServiceError(f"{where}: model_input chunk {index} is of kind {kind}; expected tokens of text")
            parts.append(_numbers(chunk.encoded_text.tokens, np.int32, f"{where}: model_input chunk {index}"))
        inputs = {name: self._tensor(tensor, name, where) for name, tensor in sorted(datum.loss_fn_inputs.items())}
        return Datum(np.concatenate(parts), inputs)

    def _tensor(self, tensor: pb.Tensor, name: str, where: str) -> np.ndarray:
        """Return int64 targets, or float32 values of any other input; [tokens] or [tokens, targets]."""
        where, shape, targets = f"{where}: loss_fn_inputs[{name[:80]!r}]", list(tensor.shape), name == "target_tokens"
        if len(shape) not in (1, 2) or (len(shape) == 2 and not 0 <= shape[1] <= MOST_TARGETS):
            raise ServiceError(
                f"{where} has shape {shape}; expected [tokens], or [tokens, up to {MOST_TARGETS} targets]"
            )
        kinds = {self._pb.DTYPE_FLOAT32: np.float32, self._pb.DTYPE_INT64: np.int64, self._pb.DTYPE_INT32: np.int32}
        kind = kinds.get(tensor.dtype)
        if kind is None or (targets and kind is np.float32):
            expected = "int64" if targets else "float32"
            raise ServiceError(f"{where} has data of type {tensor.dtype}; expected {expected}")
        if tensor.WhichOneof("encoding") == "sparse_csr":
            values = _dense(tensor.sparse_csr, shape, kind, where)
        else:
            values = _numbers(tensor.dense, kind, where)
        if any(size < 0 for size in shape) or math.prod(shape) != values.size:
            raise ServiceError(f"{where} has shape {shape} and {values.size} values")
        return values.reshape(shape).astype(np.int64 if targets else np.float32)

    def losses(self, output: LossOutput) -> bytes:
        """Return the bytes of a ForwardBackwardOutput: a record for each run of rows with as many targets a token."""
        message = self._pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
        for trailing, group in itertools.groupby(output.logprobs, lambda row: row.shape[1:]):
            rows = [np.asarray(row, np.float32) for row in group]
            field = message.loss_fn_outputs.add(num_datums=len(rows), type_tag="ArrayRecord").fields["logprobs"]
            field.dtype, field.data = self._pb.DTYPE_FLOAT32, b"".join(row.tobytes() for row in rows)
            field.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(trailing)
        return message.SerializeToString()

    def samples(self, output: RequestOutput, scores: PromptScores) -> bytes:
        """Return the bytes of a SampleResponse."""
        message, found = self._pb.SampleResponse(), output.prompt_scores
        for one in output.rollouts:
            stopped = one.finish_reason == "stop"
            message.sequences.add(
                stop_reason=self._pb.STOP_REASON_STOP if stopped else self._pb.STOP_REASON_LENGTH,
                tokens=np.asarray(one.tokens, np.int32).tobytes(),
                logprobs=np.asarray(one.logprobs, np.float32).tobytes(),
            )
        if found is not None and scores.logprobs:
            message.prompt_logprobs = np.append(np.float32(np.nan), found.logprobs).astype(np.float32).tobytes()
        if found is not None and scores.top:
            top, shape = message.topk_prompt_logprobs, (1, scores.top)
            top.length, top.k = 1 + len(found), scores.top
            tokens = np.concatenate([np.zeros(shape, np.int32), found.tokens[:, : scores.top]])
            logprobs = np.concatenate([np.full(shape, _NO_LOGPROB), found.top_logprobs[:, : scores.top]])
            top.token_ids, top.logprobs = tokens.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes()
        return message.SerializeToString()


def _numbers(raw: bytes, kind: type[np.generic], where: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(raw) % size:
        raise ServiceError(f"{where} has {len(raw)} bytes, no multiple of {size}")
    return np.frombuffer(raw, np.dtype(kind).newbyteorder("<")).astype(kind)


def _dense(sparse: pb.SparseCsr, shape: list[int], kind: type[np.generic], where: str) -> np.ndarray:
    """Return a matrix of compressed rows, with 0 where it names no value."""
    values = _numbers(sparse.values, kind, where)
    ends, columns = (_numbers(one, np.int64, where) for one in (sparse.crow_indices, sparse.col_indices))
    counts = np.diff(ends)
    sound = len(shape) == 2 and len(counts) == shape[0] and (len(ends) == 0 or ends[0] == 0) and (counts >= 0).all()
    if not sound or counts.sum() != len(values) or len(columns) != len(values):
        raise ServiceError(f"{where}: row ends, columns and values do not fit a sparse matrix of shape {shape}")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise ServiceError(f"{where}: columns of a sparse matrix beyond 0 to {shape[1] - 1}")
    dense = np.zeros(shape, kind)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense
