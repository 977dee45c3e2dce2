"""Tensor codecs: encode an array of one version of the weights as bytes, and decode it."""

import dataclasses

from mesh import UserError, did_you_mean
from rl.parameter_server.codecs.delta import DeltaCodec
from rl.parameter_server.codecs.ecsq import EcsqCodec
from rl.parameter_server.codecs.frame import TensorCodec
from rl.parameter_server.codecs.hevc import HevcCodec, load_av
from rl.parameter_server.codecs.int8 import Int8Codec
from rl.parameter_server.codecs.layout import Blob
from rl.parameter_server.codecs.plain import Bf16Codec, RawCodec
from rl.parameter_server.codecs.rows import RowCodec

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


_CODECS: dict[str, TensorCodec] = {
    codec.name: codec for codec in (RawCodec(), Bf16Codec(), Int8Codec(), DeltaCodec(), EcsqCodec(), HevcCodec())
}


def get_codec(text: str) -> TensorCodec:
    """Return the codec of this name: raw, bf16, int8, delta, ecsq or hevc; "ecsq:0.01" is one with another error.

    Raises:
        UserError: there is no such codec; suggests the nearest name. It takes no error, or none such. Or hevc lacks
            PyAV; names the extra.
    """
    name, colon, error = text.partition(":")
    if name not in _CODECS:
        hint = did_you_mean(name, list(_CODECS))
        raise UserError(f"no tensor codec {name!r}; expected one of {', '.join(_CODECS)}{hint}")
    if name == HevcCodec.name:
        load_av()
    codec = _CODECS[name]
    if not colon:
        return codec
    try:
        wanted = float(error) if isinstance(codec, RowCodec) else 0.0
    except ValueError:
        wanted = 0.0
    if not isinstance(codec, RowCodec) or not 0.0 < wanted < 1.0:
        raise UserError(
            f"tensor codec {text!r}; expected an error over the variance behind the name, as in 'ecsq:0.01'"
        )
    return dataclasses.replace(codec, error=wanted)
