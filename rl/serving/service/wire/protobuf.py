"""Protobuf messages of the Tinker API: forward_backward requests in, log-probabilities and samples out.

The message classes come from the package `tinker`, whose import takes most of a second: it is made when a service
starts, not with this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from mesh import UserError, did_you_mean
from mesh.errors import install_hint
from rl.serving.service.messages import Datum, LossName, LossOutput, SampleOutput, ServiceError
from rl.serving.service.verbs import BaseFacts

if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb

CONTENT_TYPE = "application/x-protobuf"
_NO_LOGPROB = -99999.0  # value of an empty cell of top-k log-probabilities
_LOSSES: tuple[str, ...] = get_args(LossName)


@dataclasses.dataclass(frozen=True, slots=True)
class PassContent:
    """Rows of a forward_backward request and the loss over them."""

    rows: tuple[Datum, ...]
    loss: LossName
    config: Mapping[str, float]
    forward_only: bool


class ProtobufCodec:
    """Reader of requests for a base, and writer of results."""

    def __init__(self, base: BaseFacts):
        """Import the message classes; a UserError names the extra that they come with."""
        try:
            from tinker.proto import tinker_public_pb2
        except ImportError as error:
            raise UserError(f"axl service needs the package tinker ({error}); {install_hint('service')}") from error
        self._pb = tinker_public_pb2
        self._base = base

    # ---- requests

    def request(self, raw: bytes) -> pb.ForwardBackwardRequest:
        """Return the message of a body; its rows are not looked at.

        Raises:
            ServiceError: the bytes are no such message.
        """
        from google.protobuf.message import DecodeError

        message = self._pb.ForwardBackwardRequest()
        try:
            message.ParseFromString(raw)
        except DecodeError as error:
            said = f"forward_backward: the body is no protobuf message ForwardBackwardRequest: {error}"
            raise ServiceError(said) from None
        return message

    def content(self, message: pb.ForwardBackwardRequest) -> PassContent:
        """Return what a message asks for.

        Raises:
            ServiceError: names the datum and the field at fault.
        """
        if message.loss_fn not in _LOSSES:
            raise ServiceError(
                f"loss_fn: no loss {message.loss_fn[:80]!r}{did_you_mean(message.loss_fn[:80], _LOSSES)}"
            )
        if not message.data:
            raise ServiceError("data: no datum; expected at least one")
        rows = tuple(self._datum(datum, f"datum {index}") for index, datum in enumerate(message.data))
        return PassContent(rows, cast(LossName, message.loss_fn), _config(message), message.forward_only)

    def _datum(self, datum: pb.Datum, where: str) -> Datum:
        parts: list[np.ndarray] = []
        for index, chunk in enumerate(datum.model_input):
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise ServiceError(f"{where}: model_input chunk {index} is of kind {kind}; expected tokens of text")
            parts.append(_numbers(chunk.encoded_text.tokens, np.int32, f"{where}: model_input chunk {index}"))
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        if not 1 <= len(tokens) <= self._base.context_length:
            most = self._base.context_length
            raise ServiceError(f"{where}: model_input has {len(tokens)} tokens; expected 1 to {most}")
        self._check_tokens(tokens, f"{where}: model_input")
        inputs = {name: self._tensor(tensor, name, where) for name, tensor in sorted(datum.loss_fn_inputs.items())}
        if "target_tokens" not in inputs:
            had = ", ".join(sorted(inputs)) or "nothing"
            raise ServiceError(f"{where}: loss_fn_inputs has no target_tokens, only {had}")
        for name, values in inputs.items():
            if len(values) != len(tokens):
                said = f"{where}: loss_fn_inputs[{name!r}] has {len(values)} values for {len(tokens)} tokens of input"
                raise ServiceError(said)
        self._check_tokens(inputs["target_tokens"], f"{where}: target_tokens")
        return Datum(tokens, inputs)

    def _tensor(self, tensor: pb.Tensor, name: str, where: str) -> np.ndarray:
        """Return int64 targets, or float32 values of any other input."""
        where, shape = f"{where}: loss_fn_inputs[{name[:80]!r}]", list(tensor.shape)
        if tensor.WhichOneof("encoding") == "sparse_csr" or len(shape) != 1:
            raise ServiceError(
                f"{where} has shape {shape}; expected one value a token (top-k targets have no loss here)"
            )
        kinds: dict[Any, type[np.generic]] = {
            self._pb.DTYPE_FLOAT32: np.float32,
            self._pb.DTYPE_INT64: np.int64,
            self._pb.DTYPE_INT32: np.int32,
        }
        kind = kinds.get(tensor.dtype)
        if kind is None or (name == "target_tokens" and kind is np.float32):
            expected = "int64" if name == "target_tokens" else "float32"
            raise ServiceError(f"{where} has data of type {tensor.dtype}; expected {expected}")
        values = _numbers(tensor.dense, kind, where)
        if shape != [len(values)]:
            raise ServiceError(f"{where} has shape {shape} and {len(values)} values")
        return values.astype(np.int64 if name == "target_tokens" else np.float32)

    def _check_tokens(self, tokens: np.ndarray, where: str) -> None:
        wrong = tokens[(tokens < 0) | (tokens >= self._base.vocab_size)]
        if len(wrong):
            raise ServiceError(f"{where} has token {int(wrong[0])}; the vocabulary has {self._base.vocab_size}")

    # ---- results

    def pass_output(self, output: LossOutput) -> bytes:
        """Return the bytes of a ForwardBackwardOutput."""
        message = self._pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
        record = message.loss_fn_outputs.add(num_datums=len(output.logprobs), type_tag="ArrayRecord")
        rows = [np.asarray(row, np.float32) for row in output.logprobs]
        field = record.fields["logprobs"]
        field.dtype, field.data = self._pb.DTYPE_FLOAT32, b"".join(row.tobytes() for row in rows)
        field.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes()
        return message.SerializeToString()

    def sample_output(self, output: SampleOutput) -> bytes:
        """Return the bytes of a SampleResponse."""
        message = self._pb.SampleResponse()
        reasons = {"stop": self._pb.STOP_REASON_STOP, "length": self._pb.STOP_REASON_LENGTH}
        for sample in output.samples:
            message.sequences.add(
                stop_reason=reasons[sample.stop_reason],
                tokens=np.asarray(sample.tokens, np.int32).tobytes(),
                logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
            )
        if output.prompt_logprobs is not None:
            message.prompt_logprobs = np.asarray(output.prompt_logprobs, np.float32).tobytes()
        if output.top_prompt_logprobs is not None:
            self._write_top(message.topk_prompt_logprobs, output.top_prompt_logprobs)
        return message.SerializeToString()

    def _write_top(self, message: pb.TopkLogprobs, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        k = max((len(row) for row in rows), default=0)
        tokens, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), _NO_LOGPROB, np.float32)
        for index, row in enumerate(rows):
            for rank, (token, logprob) in enumerate(row):
                tokens[index, rank], logprobs[index, rank] = token, logprob
        message.length, message.k = len(rows), k
        message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()


def unpacked(body: bytes, encoding: str | None, limit: int) -> bytes:
    """Return a body without its Content-Encoding (zstd, or none).

    Raises:
        ServiceError: damaged, of another encoding, or of more than `limit` bytes.
    """
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise ServiceError(f"Content-Encoding {encoding[:40]!r}; expected zstd or none")
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            whole = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise ServiceError(f"the body is no zstd: {error}") from None
    if len(whole) > limit:
        raise ServiceError(f"the body has more than {limit} bytes")
    return whole


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Return the loss's settings: the map with texts, and the older one of numbers where that is empty."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float] = {}
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise ServiceError(f"loss_fn_config[{name[:80]!r}] is {value.text[:80]!r}; expected a number")
        config[name] = value.number
    return config


def _numbers(raw: bytes, kind: type[np.generic], where: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(raw) % size:
        raise ServiceError(f"{where} has {len(raw)} bytes, no multiple of {size}")
    return np.frombuffer(raw, np.dtype(kind).newbyteorder("<")).astype(kind)
