"""Tensor codecs: encode an array of one version of the weights as bytes, and decode it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from mesh import UserError, did_you_mean
from rl.parameter_server.codecs.bf16 import Bf16Codec
from rl.parameter_server.codecs.delta import DeltaCodec
from rl.parameter_server.codecs.ecsq import EcsqCodec
from rl.parameter_server.codecs.hevc import HevcCodec, load_av
from rl.parameter_server.codecs.int8 import Int8Codec
from rl.parameter_server.codecs.layout import Blob
from rl.parameter_server.codecs.raw import RawCodec

__all__ = [
    "Bf16Codec",
    "Blob",
    "DeltaCodec",
    "EcsqCodec",
    "HevcCodec",
    "Int8Codec",
    "RawCodec",
    "TensorCodec",
    "get_codec",
]


class TensorCodec(Protocol):
    """Encoding of one array. Codecs are stateless and thread-safe."""

    @property
    def name(self) -> str:
        """The name by which `get_codec` finds it."""
        ...

    @property
    def lossless(self) -> bool:
        """Return True if every array of every dtype comes back bit-exact."""
        ...

    @property
    def needs_base(self) -> bool:
        """Return True if both ends must hold an earlier array of the same shape and dtype."""
        ...

    def encode(self, array: np.ndarray, base: np.ndarray | None = None) -> Blob:
        """Return the encoded bytes; the blob may be a view of `array`.

        Raises:
            WeightsError: the array cannot be encoded, or the base is missing or of another shape or dtype.
        """
        ...

    def decode(
        self, blob: Blob, *, shape: Sequence[int], dtype: DTypeLike, base: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the array, C-contiguous, writable, in memory of its own.

        Raises:
            WeightsError: the blob is damaged, or is not that of an array of this shape and dtype.
            WrongBase: the blob is a delta to something else than `base`.
        """
        ...


_CODECS: dict[str, TensorCodec] = {
    codec.name: codec for codec in (RawCodec(), Bf16Codec(), Int8Codec(), DeltaCodec(), EcsqCodec(), HevcCodec())
}


def get_codec(name: str) -> TensorCodec:
    """Return the codec of this name: raw, bf16, int8, delta, ecsq or hevc, the last two at their default error.

    Raises:
        UserError: there is no such codec; suggests the nearest name. Or hevc lacks PyAV; names the extra.
    """
    if name not in _CODECS:
        hint = did_you_mean(name, list(_CODECS))
        raise UserError(f"no tensor codec {name!r}; expected one of {', '.join(_CODECS)}{hint}")
    if name == HevcCodec.name:
        load_av()
    return _CODECS[name]
