"""Low-rank adapters from and to PEFT's form: `adapter_config.json`, and a tensor for each factor of each layer.

There, y = W x + scale * B A x with lora_A [rank, in] and lora_B [out, rank]; here, with matrices [in, out], the factors
are `q_a_dl` and `q_b_lkqh`, stacked over layers (`axlearn_like.layers.wrappers.lora`). DoRA's magnitudes are
`lora_magnitude_vector` there and `q_scale_kqh` here. An expert is a linear layer of its own there, with the factors of
its entry of `experts/gate_a_edl`: the names of transformers 4, which PEFT translates for transformers 5. Matrices that
are one linear layer there: `fused_adapters`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from axlearn_like.config import walk_configs
from axlearn_like.layers.base import Params
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.parameter_names import matrix_axes
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.lora import LoRA, factor_names
from mesh.errors import did_you_mean
from models.huggingface.architectures import architecture_for
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.fused_adapters import A, B, patterns, widen
from models.huggingface.rows import ConversionError, Row, Section, Tensor, tensors_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of PEFT's config that change what is computed, and the values that are computed here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


class PeftAdapter(NamedTuple):
    """An adapter in PEFT's form: the tensors by name, and its config."""

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A matrix of all layers of a stack that can have factors; of experts one in each.

    Attributes:
        stack: path of the stack, such as "layers."
        layers: their numbers there.
        child: of the block: "attention" or "feed_forward".
        name: of the matrix in it, such as "q_dkqh" or "experts/gate_edf".
        row: its tensor there.
    """

    stack: str
    layers: tuple[int, ...]
    child: str
    name: str
    row: Row

    @property
    def module(self) -> str:
        """The last word of the module there: "q_proj"."""
        return self.row.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def fused(self) -> bool:
        """True for some outputs of a linear layer there, whose other outputs are another matrix here."""
        return "[" in self.row.axes

    def rows(self) -> dict[str, Row]:
        """Return path of a factor here, below the stack -> its tensor there: A, B, and the magnitudes of DoRA."""
        names = factor_names(self.name, len(_letters(self.name)))
        module, folder = _PREFIX + self.row.name.removesuffix(".weight"), f"{self.child}.lora"
        inputs, outputs, part = _letters(self.name, "inputs"), _letters(self.name, "outputs"), self.row.part
        if self.fused:
            outputs = self.row.axes.partition(",")[0]
        rows = {
            names.a: Row(f"{module}{A}", f"l,{inputs}", part, shared=self.fused),
            names.b: Row(f"{module}{B}", f"{outputs},l", part),
            names.magnitude: Row(f"{module}.lora_magnitude_vector", outputs, part),
        }
        return {f"{folder}.{name.replace('/', '.')}": row for name, row in rows.items()}

    def first_names(self) -> set[str]:
        """Return the tensors there of the first layer's factors, of the first expert's."""
        return {
            row.name.format(self.layers[0], *[0] * len(_letters(self.name, "stack"))) for row in self.rows().values()
        }


def to_peft(params: Params, cfg: Decoder.Config, base: str = "") -> PeftAdapter:
    """Return the adapter of a decoder with LoRA layers.

    Args:
        params: those of the decoder; only the factors are read.
        cfg: the decoder, with its wrappers.
        base: name or path of the base model, recorded in the config.

    Raises:
        ConversionError: there are no LoRA layers, their ranks differ, or a factor has no counterpart there.
    """
    first = _loras(cfg)[0]
    arrays = {name: array for name, array in by_name(params).items() if ".lora." in name}
    matrices = list(_matrices(plain_config(cfg)))
    known = {matrix.stack + path: matrix for matrix in matrices for path in matrix.rows()}
    if unknown := sorted(arrays.keys() - known.keys()):
        raise ConversionError(
            f"factor {unknown[0]} has no counterpart in PEFT: it adapts linear layers alone, and there the matrix is "
            "one with others, or no linear layer; leave it out by LoRA's match, or export the model with --merge"
        )
    _check_fused(matrices, arrays)
    expected = _tensors(arrays, matrices)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in expected.items():
        tensors[name] = np.empty(tensor.shape, np.float32)
        for piece in tensor.pieces:
            piece.view(tensors[name])[...] = np.asarray(arrays[piece.parameter][piece.index], np.float32)
    counts = widen(tensors, expected, arrays)
    config = {
        **{name: values[0] for name, values in _ONLY.items()},
        **patterns(counts, first.rank, first.alpha, stabilised=first.rank_stabilised),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "r": first.rank,
        "target_modules": sorted({known[name].module for name in arrays}),
        "task_type": "CAUSAL_LM",
        "use_dora": first.magnitudes,
        "use_rslora": first.rank_stabilised,
    }
    return PeftAdapter(tensors, dict(sorted(config.items())))


def from_peft(adapter: PeftAdapter, cfg: Decoder.Config) -> tuple[Decoder.Config, Params]:
    """Return a plain decoder's config with LoRA layers, and the factors alone, float32, as nested dict.

    Raises:
        ConversionError: the adapter has what is not computed here, or tensors of another model.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
    adapted, expected = adapter_tensors(shapes, adapter.config, cfg)
    described = by_name(abstract_params(adapted))
    params: Params = {}
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in expected.items():
        for piece in tensor.pieces:
            if piece.parameter not in arrays:
                arrays[piece.parameter] = np.empty(described[piece.parameter].shape, np.float32)
                _put(params, piece.parameter, arrays[piece.parameter])
            arrays[piece.parameter][piece.index] = piece.view(np.asarray(adapter.tensors[name]))
    return adapted, params


def adapter_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], cfg: Decoder.Config
) -> tuple[Decoder.Config, dict[str, Tensor]]:
    """Return a plain decoder's config with LoRA layers, and an adapter's tensors: name -> shape, and factors here.

    Args:
        shapes: of the tensors that are there.
        config: of PEFT.
        cfg: the decoder.

    Raises:
        ConversionError: the adapter has what is not computed here, or tensors of another model.
    """
    for name, values in _ONLY.items():
        if name in config and config[name] not in values:
            raise ConversionError(f"{CONFIG}: {name} is {config[name]!r}; expected {values[0]!r}")
    every = list(_matrices(cfg))
    matrices = [one for one in every if not one.first_names().isdisjoint(shapes)]
    lora = {"rank": config["r"], "alpha": float(config["lora_alpha"]), "magnitudes": bool(config.get("use_dora"))}
    adapted = _adapted(cfg, matrices, **lora, rank_stabilised=bool(config.get("use_rslora")))
    factors = {name: leaf for name, leaf in by_name(abstract_params(adapted)).items() if ".lora." in name}
    expected = _tensors(factors, matrices)
    unknown, missing = sorted(shapes.keys() - expected.keys()), sorted(expected.keys() - shapes.keys())
    if unknown or missing:
        known = [name for one in every for name in sorted(one.first_names())]
        hint = did_you_mean(unknown[0], known) if unknown else ""
        raise ConversionError(f"{TENSORS}: unknown: {unknown[:4]}, missing: {missing[:4]}{hint}")
    for name, tensor in expected.items():
        if shapes[name] != tensor.shape:
            raise ConversionError(f"{TENSORS}: {name} is {shapes[name]}; expected {tensor.shape}")
    return adapted, expected


def _check_fused(matrices: list[_Matrix], arrays: Mapping[str, Any]) -> None:
    """Refuse factors of some of the matrices that are one linear layer there (ConversionError)."""
    adapted = {one: any(one.stack + path in arrays for path in one.rows()) for one in matrices if one.fused}
    for one, has in adapted.items():
        layer = {
            other.name: there
            for other, there in adapted.items()
            if (other.stack, other.row.name) == (one.stack, one.row.name)
        }
        if has and not all(layer.values()):
            raise ConversionError(
                f"{one.stack}{one.child}: {one.name} alone has factors; in PEFT {' and '.join(layer)} are one linear "
                f"layer, {one.module}: adapt all or none of them by LoRA's match, or export the model with --merge"
            )


def _tensors(factors: Mapping[str, Any], matrices: Iterable[_Matrix]) -> dict[str, Tensor]:
    """Return the tensors there of factors by their paths here."""
    tree: Params = {}
    for name, leaf in factors.items():
        _put(tree, name, leaf)
    sections = [Section(one.stack, one.rows(), one.layers) for one in matrices]
    return tensors_of(tree, sections, "PEFT")


def _matrices(cfg: Decoder.Config) -> Iterator[_Matrix]:
    """Yield the matrices of a plain decoder's blocks that are linear layers there, or some outputs of one."""
    for section in architecture_for(cfg).sections(cfg):
        for path, row in section.rows.items():
            child, _, inner = path.partition(".")
            name = inner.replace(".", "/")
            linear = row.axes.count(",") == 1 and "[" not in row.axes.partition(",")[2]
            if section.layers is None or not linear or matrix_axes(name, len(_letters(name))) is None:
                continue
            if row.name.count("{}") == 1 + len(_letters(name, "stack")):
                yield _Matrix(section.prefix, section.layers, child, name, row)


def _letters(name: str, axes: Literal["stack", "inputs", "outputs"] | None = None) -> str:
    """Return the letters of a matrix's axes, all or some: "edf" of experts/gate_edf, whose stack is "e"."""
    suffix = name.rpartition("_")[2]
    found = matrix_axes(name, len(suffix))
    return suffix if axes is None or found is None else "".join(suffix[axis] for axis in getattr(found, axes))


def _loras(cfg: Decoder.Config) -> list[LoRA.Config]:
    """Return the LoRA layers of a decoder, which are all alike."""
    found = [node for _, node in walk_configs(cfg) if isinstance(node, LoRA.Config)]
    if not found:
        raise ConversionError("this model has no LoRA layers: it has no adapter")
    kinds = {(one.rank, one.alpha, one.rank_stabilised, one.magnitudes) for one in found}
    if len(kinds) > 1:
        fields = "(rank, alpha, rank_stabilised, magnitudes)"
        raise ConversionError(f"LoRA layers differ in {fields}: {sorted(kinds)}; expected one")
    return found


def _adapted(cfg: Decoder.Config, matrices: list[_Matrix], **lora: Any) -> Decoder.Config:
    """Return the config with LoRA around the layers of the blocks that have these matrices."""

    def adapted(block: Any, leading: bool) -> Any:
        if not isinstance(block, Block.Config):
            raise ConversionError(f"adapters are read for models of Blocks; this one has {type(block).__qualname__}")
        own = [matrix for matrix in matrices if (matrix.stack == "leading.") == leading]
        changed = block.clone()
        for child in {matrix.child for matrix in own}:
            match = tuple(dict.fromkeys(matrix.name for matrix in own if matrix.child == child))
            changed.set(**{child: LoRA.Config(inner=getattr(changed, child), match=match, skip="", **lora)})
        return changed

    block = cfg.block
    if not isinstance(block, BlockPattern.Config):
        return cfg.clone(block=adapted(block, leading=False))
    blocks = tuple(adapted(one, leading=False) for one in block.blocks)
    first = None if block.leading is None else adapted(block.leading, leading=True)
    return cfg.clone(block=block.clone(blocks=blocks, leading=first))


def _put(params: Params, path: str, array: np.ndarray) -> None:
    *folders, last = path.split(".")
    folder: Any = params
    for key in folders:
        folder = folder.setdefault(key, {})
    folder[last] = array
