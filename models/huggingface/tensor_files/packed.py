"""Tensors that a file holds as fewer bits, with scales in a tensor beside them: read as bfloat16, some rows at a time.

* fp8 (DeepSeek-V3): e4m3 numbers `NAME`, and a factor for each block of 128 x 128 of them in `NAME_scale_inv`.
* MXFP4 (gpt-oss; OCP Microscaling Formats 1.0): `NAME_blocks`, two e2m1 numbers a byte, the first in the low half, in
  blocks of 32 with a power of two each, an e8m0 number in `NAME_scales`. Its matrices are [out, in].
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, override

import jax.numpy as jnp
import numpy as np

from models.huggingface.config_json import ConfigJson
from models.huggingface.rows import ConversionError, Piece
from models.huggingface.tensor_files.safetensors import DTYPES, Stored

PACKING = "quantization_config"


class TensorPacking(NamedTuple):
    """How the matrices are held; those that are not are held as they are."""

    # fp8 (e4m3 numbers in blocks with float32 scales) or mxfp4 (e2m1 numbers, 32 with a power of two)
    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)  # rows and columns of an fp8 matrix that have the same scale


_METHODS: dict[str, Literal["fp8", "mxfp4"]] = {"fp8": "fp8", "mxfp4": "mxfp4"}


def unread_packing(json: ConfigJson) -> str | None:
    """Return the method of a `config.json` that is not read, such as bitsandbytes; the tensors may be floats anyway."""
    found = json.nested(PACKING)
    method = None if found is None else found.text("quant_method")
    return None if method in _METHODS else method


def read_packing(json: ConfigJson) -> TensorPacking | None:
    """Return what a `config.json` says, None where nothing is packed, or by an `unread_packing`.

    Raises:
        ConfigJsonError: it is another form of fp8; names the field.
    """
    found = json.nested(PACKING)
    method = None if found is None else _METHODS.get(found.text("quant_method"))
    if found is None or method is None:
        return None
    if method == "mxfp4":
        return TensorPacking(method)
    found.only("fmt", "e4m3")
    found.only("activation_scheme", "dynamic")
    block = found.array("weight_block_size", [128, 128])
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise found.error("weight_block_size", "two sizes, such as [128, 128]", f"{block!r}")
    return TensorPacking(method, (block[0], block[1]))


BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255  # bias and NaN of e8m0
_MX_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class ComputedTensor(abc.ABC):
    """A tensor that is computed from what a file holds; the counterpart of `Stored`."""

    name: str  # the tensor's name
    values: Stored  # the tensor in the file

    @property
    def path(self) -> Path:
        """The file."""
        return self.values.path

    @property
    def start(self) -> int:
        """The first byte in the file."""
        return self.values.start

    @property
    def dtype(self) -> str:
        """The dtype of what is read, as safetensors names it."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """The bytes of what is read."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def map(self) -> np.ndarray:
        """Return the whole tensor."""
        return self.rows(0, self.shape[0])

    @abc.abstractmethod
    def rows(self, first: int, last: int) -> np.ndarray:
        """Return rows of the first axis."""

    @abc.abstractmethod
    def stored(self, first: int, last: int) -> tuple[Stored, ...]:
        """Return the parts of files that `rows` reads."""


TensorSource = Stored | ComputedTensor  # a tensor of a checkpoint


def read_piece(source: TensorSource, piece: Piece, first: int, last: int) -> np.ndarray:
    """Return indices of the first stored axis of a piece, with the axes in the order in which they are stored."""
    return piece.of_rows(source.rows(*piece.spanned(source.shape[0], first, last)), first, last)


@dataclasses.dataclass(frozen=True)
class Packed(ComputedTensor):
    """A tensor of fewer bits that is read as bfloat16; `scales`: those of its blocks."""

    scales: Stored

    @property
    @override
    def dtype(self) -> str:
        return "BF16"

    @override
    def stored(self, first: int, last: int) -> tuple[Stored, ...]:
        return self.values.part(first, last), self.scales.part(first, last)


@dataclasses.dataclass(frozen=True)
class Fp8Matrix(Packed):
    """Float8 numbers [out, in], and factors [out / block, in / block], rounded up, that they are multiplied by."""

    block: tuple[int, int]

    @override
    def stored(self, first: int, last: int) -> tuple[Stored, ...]:
        height = self.block[0]
        return self.values.part(first, last), self.scales.part(first // height, -(-last // height))

    @override
    def rows(self, first: int, last: int) -> np.ndarray:
        """Return rows as bfloat16: float32 products, rounded once."""
        (height, width), columns = self.block, self.shape[1]
        values, factors = (part.map() for part in self.stored(first, last))
        wide = np.repeat(factors.astype(np.float32), width, axis=1)[:, :columns]
        numbers = _e4m3()[values.view(np.uint8)]
        numbers *= wide[np.arange(first, last) // height - first // height]
        return numbers.astype(jnp.bfloat16)


class Mxfp4Matrices(Packed):
    """Blocks [matrices, out, blocks, 16] of two 4-bit numbers a byte, and exponents [matrices, out, blocks]."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:2], self.values.shape[2] * _MX_BLOCK

    @override
    def rows(self, first: int, last: int) -> np.ndarray:
        """Return some matrices as bfloat16, which holds every product exactly.

        A block's scale and a byte of it choose a pair of numbers from a table of all.

        Raises:
            ConversionError: a scale is not a number; names the tensor.
        """
        values, scales = (part.map() for part in self.stored(first, last))
        if (scales == _NAN).any():
            raise ConversionError(f"{self.scales.path}: {self.name}{SCALES}: expected scales of 0 to 254, got {_NAN}")
        pairs = np.take(_e2m1_pairs(), scales.astype(np.uint16)[..., None] << 8 | values)
        return pairs.view(jnp.bfloat16).reshape(last - first, *self.shape[1:])


def unpacked(tensors: Mapping[str, Stored], packing: TensorPacking) -> dict[str, TensorSource]:
    """Return the tensors of a checkpoint with packed ones and their scales joined.

    Raises:
        ConversionError: scales are missing, or of another shape or dtype; names the tensor.
    """
    found: dict[str, Any] = dict(tensors)
    for name, stored in tensors.items():
        if packing.method == "fp8" and stored.dtype == "F8_E4M3":
            found[name] = _fp8(name, stored, found.pop(name + FACTORS, None), packing.block)
        elif packing.method == "mxfp4" and name.endswith(BLOCKS):
            base = name.removesuffix(BLOCKS)
            if base in tensors:
                raise ConversionError(f"{stored.path}: the file has both {base} and {name}; expected one of them")
            found[base] = _mxfp4(base, found.pop(name), found.pop(base + SCALES, None))
    return found


def _fp8(name: str, values: Stored, factors: Stored | None, block: tuple[int, int]) -> Fp8Matrix:
    if len(values.shape) != 2:
        raise ConversionError(f"{values.path}: {name}: expected a matrix of float8 numbers, got shape {values.shape}")
    rows, columns = values.shape
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    size = f"one for each {block[0]} x {block[1]} of {name} {values.shape}"
    return Fp8Matrix(name, values, _scales(values, name + FACTORS, factors, shape, ("F32", "BF16"), size), block)


def _mxfp4(name: str, blocks: Stored, scales: Stored | None) -> Mxfp4Matrices:
    if len(blocks.shape) != 4 or blocks.shape[3] != _MX_BLOCK // 2 or blocks.dtype != "U8":
        expected = f"U8 [matrices, out, blocks, {_MX_BLOCK // 2}]"
        raise ConversionError(
            f"{blocks.path}: {name}{BLOCKS}: expected {expected}, got {blocks.dtype} {list(blocks.shape)}"
        )
    size = f"one for each block of {name}{BLOCKS}"
    return Mxfp4Matrices(name, blocks, _scales(blocks, name + SCALES, scales, blocks.shape[:3], ("U8",), size))


def _scales(
    values: Stored, name: str, found: Stored | None, shape: tuple[int, ...], dtypes: tuple[str, ...], size: str
) -> Stored:
    expected = f"{' or '.join(dtypes)} {list(shape)}, {size}"
    if found is None:
        raise ConversionError(f"{values.path}: {name}: expected {expected}; there is no such tensor")
    if found.shape != shape or found.dtype not in dtypes:
        raise ConversionError(f"{found.path}: {name}: expected {expected}, got {found.dtype} {list(found.shape)}")
    return found


@cache
def _e4m3() -> np.ndarray:
    """Return float32 [256], the number of each byte."""
    return np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


@cache
def _e2m1_pairs() -> np.ndarray:
    """Return uint32 [256 * 256], two bfloat16 each: the numbers of a byte times a scale, by scale and byte."""
    numbers = np.array([*_E2M1, *(-number for number in _E2M1)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(pairs, (np.arange(256, dtype=np.int32) - _BIAS)[:, None, None])
    return np.ascontiguousarray(scaled.astype(jnp.bfloat16)).view(np.uint32).reshape(-1)
