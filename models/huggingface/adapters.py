"""Low-rank adapters from and to PEFT's form: `adapter_config.json`, and a tensor for each factor of each layer.

In PEFT, y = W x + scale * B A x with lora_A [rank, in] and lora_B [out, rank]; ours, with matrices [in, out], are
`q_a_dl` and `q_b_lkqh`, stacked over layers (`axlearn_like.layers.wrappers.lora`). DoRA's magnitudes are
`lora_magnitude_vector` in PEFT and `q_scale_kqh` of ours. `adapter_rows` says which tensor a factor is, those of
experts too; `fused_adapters` reads and writes matrices that are one linear layer in PEFT.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from axlearn_like.config import walk_configs
from axlearn_like.layers.base import Params
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.lora import LoRA
from mesh.errors import did_you_mean
from models.huggingface.adapter_rows import FactoredMatrix, factor_tensors, matrices_of, put
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.fused_adapters import narrow, patterns, ranks, wide_shape, widen
from models.huggingface.rows import ConversionError, Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Fields of PEFT's config that change the function, and the values that our layers compute.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "trainable_token_indices": (None, []),
}


class PeftAdapter(NamedTuple):
    """An adapter in PEFT's form: the tensors by name, and its config."""

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]


def to_peft(params: Params, cfg: Decoder.Config, base: str = "") -> PeftAdapter:
    """Return the adapter of a decoder with LoRA layers.

    Args:
        params: those of the decoder; only the factors are read.
        base: name or path of the base model, recorded in the config.

    Raises:
        ConversionError: there are no LoRA layers, their ranks differ, or PEFT has no counterpart of a factor.
    """
    first = _loras(cfg)[0]
    arrays = {name: array for name, array in by_name(params).items() if ".lora." in name}
    matrices = list(matrices_of(plain_config(cfg)))
    known = {matrix.stack + path: matrix for matrix in matrices for path in matrix.rows()}
    if unknown := sorted(arrays.keys() - known.keys()):
        raise ConversionError(
            f"factor {unknown[0]} has no counterpart in PEFT: it adapts linear layers alone, and in transformers "
            "the matrix is one with others, or no linear layer; leave it out by LoRA's match, or export the model with "
            "--merge"
        )
    _check_fused(matrices, arrays)
    wide = _differing(matrices, arrays)
    expected = factor_tensors(arrays, matrices, wide)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in expected.items():
        tensors[name] = np.empty(tensor.shape, np.float32)
        for piece in tensor.pieces:
            piece.view(tensors[name])[...] = np.asarray(arrays[piece.parameter][piece.index], np.float32)
        if ranks(expected, name) > 1:
            tensors[name] = widen(tensor, tensors[name])
    adapted = [known[name] for name in arrays]
    parameters = sorted({one.parameter for one in adapted if one.packed})
    config = {
        **{name: values[0] for name, values in _ONLY.items()},
        **patterns(wide, first.rank, first.alpha, stabilised=first.rank_stabilised),
        "base_model_name_or_path": base,
        "fan_in_fan_out": any(one.input_first for one in adapted),
        "inference_mode": True,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0 if parameters else first.dropout,  # PEFT refuses dropout of parameters
        "r": first.rank,
        "target_modules": _target_modules(matrices, adapted),
        "target_parameters": parameters or None,
        "task_type": "CAUSAL_LM",
        "use_dora": first.magnitudes,
        "use_rslora": first.rank_stabilised,
    }
    return PeftAdapter(tensors, dict(sorted(config.items())))


def from_peft(adapter: PeftAdapter, cfg: Decoder.Config) -> tuple[Decoder.Config, Params]:
    """Return a plain decoder's config with LoRA layers, and the factors alone, float32, as nested dict.

    Raises:
        ConversionError: the adapter has what our layers do not compute, or tensors of another model.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
    adapted, expected = adapter_tensors(shapes, adapter.config, cfg)
    described = by_name(abstract_params(adapted))
    params: Params = {}
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in expected.items():
        found = np.asarray(adapter.tensors[name])
        found = narrow(name, tensor, found) if ranks(expected, name) > 1 else found
        for piece in tensor.pieces:
            if piece.parameter not in arrays:
                arrays[piece.parameter] = np.empty(described[piece.parameter].shape, np.float32)
                put(params, piece.parameter, arrays[piece.parameter])
            arrays[piece.parameter][piece.index] = piece.view(found)
    return adapted, params


def adapter_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], cfg: Decoder.Config
) -> tuple[Decoder.Config, dict[str, Tensor]]:
    """Return a plain decoder's config with LoRA layers, and the tensors of an adapter: name -> shape, and factors.

    Args:
        shapes: shapes of the tensors in the file.
        config: PEFT's config.

    Raises:
        ConversionError: the adapter has what our layers do not compute, or tensors of another model.
    """
    for name, values in _ONLY.items():
        if name in config and config[name] not in values:
            raise ConversionError(f"{CONFIG}: {name} is {config[name]!r:.200}; expected {values[0]!r}")
    every = list(matrices_of(cfg))
    targets = _targets(every, config)
    matrices = [
        one for one in every if (one.parameter in targets if one.packed else not one.first_names().isdisjoint(shapes))
    ]
    wide = _wide(matrices, config)
    lora = {"rank": config["r"], "alpha": float(config["lora_alpha"]), "magnitudes": bool(config.get("use_dora"))}
    adapted = _adapted(cfg, matrices, **lora, rank_stabilised=bool(config.get("use_rslora")))
    factors = {name: leaf for name, leaf in by_name(abstract_params(adapted)).items() if ".lora." in name}
    expected = factor_tensors(factors, matrices, wide)
    unknown, missing = sorted(shapes.keys() - expected.keys()), sorted(expected.keys() - shapes.keys())
    if unknown or missing:
        known = [name for one in every for name in sorted(one.first_names())]
        hint = did_you_mean(unknown[0], known) if unknown else ""
        raise ConversionError(f"{TENSORS}: unknown: {unknown[:4]}, missing: {missing[:4]}{hint}")
    for name in expected:
        if shapes[name] != (shape := wide_shape(expected, name)):
            raise ConversionError(f"{TENSORS}: {name} is {shapes[name]}; expected {shape}")
    return adapted, expected


def _target_modules(matrices: list[FactoredMatrix], adapted: list[FactoredMatrix]) -> list[str]:
    """Return the names by which PEFT finds the adapted layers, and no others: with GPT-2, "attn.c_proj", not "c_proj".

    By the last word where all layers of that name are adapted, else by all words behind the layer's number.
    """
    others = {one.module for one in matrices if one.row.name not in {other.row.name for other in adapted}}
    linear = [one for one in adapted if not one.packed]
    long = {one: one.row.name.removesuffix(".weight").rpartition("{}.")[2] for one in linear}
    return sorted({long[one] if one.module in others else one.module for one in linear})


def _targets(matrices: list[FactoredMatrix], config: Mapping[str, Any]) -> set[str]:
    """Return the packed experts that `target_parameters` names (ConversionError: it names something else)."""
    packed, named = {one.parameter for one in matrices if one.packed}, config.get("target_parameters") or []
    found = {parameter for parameter in packed for target in named if f".{parameter}".endswith(f".{target}")}
    unknown = [target for target in named if not any(f".{one}".endswith(f".{target}") for one in packed)]
    if unknown:
        raise ConversionError(
            f"{CONFIG}: target_parameters: this model has no experts {unknown[0]!r:.200}{_known(packed)}"
        )
    return found


def _known(names: set[str]) -> str:
    return f"; known: {', '.join(sorted(names))}" if names else ", whose matrices are linear layers"


def _wide(matrices: list[FactoredMatrix], config: Mapping[str, Any]) -> dict[str, int]:
    """Return module -> ranks, for the layers of PEFT that are several matrices of ours and have a rank for each.

    Raises:
        ConversionError: `rank_pattern` or `alpha_pattern` says something else.
    """
    parts = _parts(matrices)
    found = {fields: config.get(fields) or {} for fields in ("rank_pattern", "alpha_pattern")}
    counts = {module: parts[module] for module in found["rank_pattern"] if module in parts}
    stabilised = bool(config.get("use_rslora"))
    expected = patterns(counts, config["r"], config["lora_alpha"], stabilised=stabilised)
    for field, wanted in expected.items():
        given: Any = found[field]
        if given.keys() != wanted.keys() or not all(math.isclose(given[name], wanted[name]) for name in wanted):
            several = patterns(parts, config["r"], config["lora_alpha"], stabilised=stabilised)[field]
            hint = f" or {several}, of layers that are several matrices of ours" if several else ""
            raise ConversionError(f"{CONFIG}: {field} is {given!r:.200}; expected {{}}{hint}")
    return counts


def _parts(matrices: list[FactoredMatrix]) -> dict[str, int]:
    """Return the modules of fused matrices, and how many each has."""
    names: dict[str, set[str]] = {}
    for one in matrices:
        if one.fused:
            names.setdefault(one.module, set()).add(one.name)
    return {module: len(each) for module, each in names.items()}


def _differing(matrices: list[FactoredMatrix], arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return the modules whose matrices differ in their factors A in some layer, and how many each has."""
    first: dict[tuple[str, str], Any] = {}
    found: set[str] = set()
    for one in matrices:
        path = one.stack + next(iter(one.rows()))
        if one.fused and path in arrays:
            factor = np.asarray(arrays[path])
            if not np.array_equal(first.setdefault((one.stack, one.row.name), factor), factor):
                found.add(one.module)
    return {module: count for module, count in _parts(matrices).items() if module in found}


def _check_fused(matrices: list[FactoredMatrix], arrays: Mapping[str, Any]) -> None:
    """Refuse factors of some, not all, of the matrices that are one linear layer in PEFT (ConversionError)."""
    adapted = {one: any(one.stack + path in arrays for path in one.rows()) for one in matrices if one.fused}
    for one, has in adapted.items():
        layer = {
            other.name: present
            for other, present in adapted.items()
            if (other.stack, other.row.name) == (one.stack, one.row.name)
        }
        if has and not all(layer.values()):
            raise ConversionError(
                f"{one.stack}{one.child}: {one.name} alone has factors; in PEFT {' and '.join(layer)} are one linear "
                f"layer, {one.module}: adapt all or none of them by LoRA's match, or export the model with --merge"
            )


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


def _adapted(cfg: Decoder.Config, matrices: list[FactoredMatrix], **lora: Any) -> Decoder.Config:
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
