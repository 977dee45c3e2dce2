"""The parameters of a checkpoint with LoRA layers as those of the plain model: each matrix with its factors added.

One entry of a stack at a time, as an export reads them: the base is never in memory as a whole.
"""

from typing import Any

import numpy as np

from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.parameter_names import matrix_axes
from axlearn_like.layers.wrappers.adapters import walk_wrappers
from axlearn_like.layers.wrappers.int8_base import scale_name
from axlearn_like.layers.wrappers.lora import LoRA, factor_names
from models.huggingface.checkpoints.exporting import Entries, whole_stack
from models.huggingface.rows import ConversionError


class MergedParams:
    """Entries of the plain model, as `SavedParams` has those of what was saved."""

    def __init__(self, saved: Entries, model: Decoder.Config, scale: float = 1.0):
        """Read the factors, which are small.

        Args:
            scale: factor of all updates; 0 gives the base.

        Raises:
            ConversionError: the model has other wrappers than LoRA.
        """
        self._saved, self.path = saved, saved.path
        built = build_abstract(model)
        places: dict[str, str] = {}  # parameter of the plain model -> parameter of this one
        self._factors: dict[str, tuple[str, Any, Any, Any]] = {}
        self._magnitudes: dict[str, Any] = {}
        self._scales: dict[str, Any] = {}  # scales of matrices that are int8 numbers
        self._sides: dict[str, tuple[int, int]] = {}  # numbers of axes
        for path, place, layer in walk_wrappers(built):
            if not isinstance(layer, LoRA):
                raise ConversionError(f"{path}{type(layer).__name__}: only LoRA layers are merged")
            places[path] = place
            for name in layer.names:
                suffix = len(name.rpartition("_")[2])
                names, axes = factor_names(name, suffix), matrix_axes(name, suffix)
                assert axes is not None, name
                a, b = (whole_stack(saved, f"{place}lora/{one}") for one in (names.a, names.b))
                # An entry may be one expert's matrix: axes of stacks are left to the dots.
                product = names.product.translate({ord(name[axis - suffix]): None for axis in axes.stack})
                self._factors[path + name] = product, a, b, np.float32(scale * layer.scale)
                self._sides[path + name] = len(axes.inputs), len(axes.outputs)
                if layer.int8:
                    self._scales[path + name] = whole_stack(saved, f"{place}base/{scale_name(name, suffix)}")
                if layer.magnitudes and scale:
                    self._magnitudes[path + name] = whole_stack(saved, f"{place}lora/{names.magnitude}")
        inner = {f"{place}inner/": path for path, place in places.items()}
        self._names: dict[str, str] = {}
        for name in saved.manifest:
            if {"lora", "base"} & set(name.split("/")):
                continue
            found = next((one for one in inner if name.startswith(one)), None)
            self._names[name if found is None else inner[found] + name.removeprefix(found)] = name
        self.manifest = {plain: saved.manifest[name] for plain, name in self._names.items()}
        for name in self._scales:
            self.manifest[name] = {**self.manifest[name], "dtype": "float32"}

    def entry(self, name: str, index: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
        """Return one entry of a stack, its axes in this order, contiguous: rounded as the layer rounds it.

        Raises:
            CheckpointError: as `SavedParams.entry`.
        """
        base = self._saved.entry(self._names[name], index, order)
        if name in self._scales:
            base = _by_output(base.transpose(np.argsort(order)), self._scales[name][index], *self._sides[name])
            base = base.transpose(order)
        if name not in self._factors:
            return base
        product, a, b, scale = self._factors[name]
        update = scale * np.einsum(product, a[index].astype(np.float32), b[index].astype(np.float32))
        total = base + update.astype(base.dtype).transpose(order)
        if name in self._magnitudes:
            total = _scaled(total.transpose(np.argsort(order)), self._magnitudes[name][index], *self._sides[name])
            total = total.transpose(order)
        return np.ascontiguousarray(total)


def _scaled(weight: np.ndarray, magnitude: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """Return a matrix, or a stack of some, whose outputs have these norms; the last axes are inputs and outputs."""
    wide, last = weight.astype(np.float32), weight.ndim - outputs
    share = magnitude.astype(np.float32) / np.sqrt(np.sum(wide * wide, axis=tuple(range(last - inputs, last))))
    return _by_output(weight, share.astype(weight.dtype), inputs, outputs)


def _by_output(weight: np.ndarray, factor: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """Return a matrix with each output times its own factor, in the factors' type."""
    last = weight.ndim - outputs
    return weight.astype(factor.dtype) * np.expand_dims(factor, tuple(range(last - inputs, last)))
