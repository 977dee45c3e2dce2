"""Low-rank adapters from and to PEFT's form: `adapter_config.json`, and a tensor for each factor of each layer.

There, y = W x + scale * B A x with lora_A [rank, in] and lora_B [out, rank]; here, with matrices [in, out], the factors
are `q_a_dl` and `q_b_lkqh`, stacked over layers (`axlearn_like.layers.wrappers.lora`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from axlearn_like.config import walk_configs
from axlearn_like.layers.base import Params
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.lora import LoRA, factor_names
from mesh.errors import did_you_mean
from models.huggingface.architectures import architecture_for
from models.huggingface.convert import by_name
from models.huggingface.rows import ConversionError, Row

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of PEFT's config that change what is computed, and the values that are computed here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


class Adapter(NamedTuple):
    """An adapter in PEFT's form: the tensors by name, and its config."""

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A matrix of all layers of a stack that can have factors.

    Attributes:
        stack: path of the stack, such as "layers."
        layers: their numbers there.
        child: of the block: "attention" or "feed_forward".
        name: of the matrix in it, such as "q_dkqh".
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

    def factors(self) -> tuple[str, str]:
        """Return the paths of both factors here."""
        ndim = len(self.name.rpartition("_")[2])
        names = factor_names(self.name, ndim)
        folder = f"{self.stack}{self.child}.lora"
        return f"{folder}.{names.a}", f"{folder}.{names.b}"

    def tensors(self, layer: int) -> tuple[str, str]:
        """Return the names of both factors of a layer there."""
        module = _PREFIX + self.row.name.format(self.layers[layer]).removesuffix(".weight")
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def to_peft(params: Params, cfg: Decoder.Config, base: str = "") -> Adapter:
    """Return the adapter of a decoder with LoRA layers.

    Args:
        params: those of the decoder; only the factors are read.
        cfg: the decoder, with its wrappers.
        base: name or path of the base model, recorded in the config.

    Raises:
        ConversionError: there are no LoRA layers, their ranks differ, or a factor has no counterpart there.
    """
    loras = _loras(cfg)
    arrays = {name: array for name, array in by_name(params).items() if ".lora." in name}
    modules, tensors = set[str](), dict[str, np.ndarray]()
    for matrix in _matrices(plain_config(cfg)):
        if matrix.factors()[0] not in arrays:
            continue
        a, b = (np.asarray(arrays.pop(name), np.float32) for name in matrix.factors())
        modules.add(matrix.module)
        for layer in range(len(matrix.layers)):
            name_a, name_b = matrix.tensors(layer)
            tensors[name_a] = np.ascontiguousarray(a[layer].reshape(-1, a.shape[-1]).T)
            tensors[name_b] = np.ascontiguousarray(b[layer].reshape(b.shape[1], -1).T)
    if arrays:
        raise ConversionError(f"factor {min(arrays)} has no counterpart in PEFT: it adapts linear layers alone")
    first = loras[0]
    config = {
        **{name: values[0] for name, values in _ONLY.items()},
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "r": first.rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": first.rank_stabilised,
    }
    return Adapter(tensors, dict(sorted(config.items())))


def from_peft(adapter: Adapter, cfg: Decoder.Config) -> tuple[Decoder.Config, Params]:
    """Return a plain decoder's config with LoRA layers, and the factors alone, float32, as nested dict.

    Raises:
        ConversionError: the adapter has what is not computed here, or tensors of another model.
    """
    tensors, config = adapter
    for name, values in _ONLY.items():
        if name in config and config[name] not in values:
            raise ConversionError(f"{CONFIG}: {name} is {config[name]!r}; expected {values[0]!r}")
    matrices = [matrix for matrix in _matrices(cfg) if matrix.tensors(0)[0] in tensors]
    wanted = [name for one in matrices for layer in range(len(one.layers)) for name in one.tensors(layer)]
    unknown, missing = sorted(tensors.keys() - set(wanted)), sorted(set(wanted) - tensors.keys())
    if unknown or missing:
        known = [name for one in _matrices(cfg) for name in one.tensors(0)]
        hint = did_you_mean(unknown[0], known) if unknown else ""
        raise ConversionError(f"{TENSORS}: unknown: {unknown[:4]}, missing: {missing[:4]}{hint}")
    lora = {"rank": config["r"], "alpha": float(config["lora_alpha"])}
    adapted = _adapted(cfg, matrices, **lora, rank_stabilised=bool(config.get("use_rslora")))
    shapes = _shapes(adapted)
    params: Params = {}
    for matrix in matrices:
        for side, path in enumerate(matrix.factors()):
            shape = shapes[path]
            parts = [
                np.asarray(tensors[matrix.tensors(layer)[side]], np.float32) for layer in range(len(matrix.layers))
            ]
            theirs = (shape[-1], int(np.prod(shape[1:-1]))) if side == 0 else (int(np.prod(shape[2:])), shape[1])
            for layer, part in enumerate(parts):
                if part.shape != theirs:
                    name = matrix.tensors(layer)[side]
                    raise ConversionError(f"{TENSORS}: {name} is {part.shape}; expected {theirs}")
            _put(params, path, np.stack([part.T.reshape(shape[1:]) for part in parts]))
    return adapted, params


def _matrices(cfg: Decoder.Config) -> Iterator[_Matrix]:
    """Yield the matrices of a plain decoder's blocks that are whole linear layers there."""
    for section in architecture_for(cfg).sections(cfg):
        for path, row in section.rows.items():
            child, _, name = path.partition(".")
            linear = row.axes.count(",") == 1 and "[" not in row.axes and row.name.count("{}") == 1
            if section.layers is not None and linear and "." not in name:
                yield _Matrix(section.prefix, section.layers, child, name, row)


def _loras(cfg: Decoder.Config) -> list[LoRA.Config]:
    """Return the LoRA layers of a decoder, which are all alike."""
    found = [node for _, node in walk_configs(cfg) if isinstance(node, LoRA.Config)]
    if not found:
        raise ConversionError("this model has no LoRA layers: it has no adapter")
    kinds = {(one.rank, one.alpha, one.rank_stabilised) for one in found}
    if len(kinds) > 1:
        raise ConversionError(f"LoRA layers differ in (rank, alpha, rank_stabilised): {sorted(kinds)}; expected one")
    return found


def _adapted(cfg: Decoder.Config, matrices: list[_Matrix], **lora: Any) -> Decoder.Config:
    """Return the config with LoRA around the layers of the block that have these matrices."""
    block: Any = cfg.block
    if isinstance(block, BlockPattern.Config) or not isinstance(block, Block.Config):
        raise ConversionError("adapters are read for models whose blocks are all alike")
    changed = block.clone()
    for child in {matrix.child for matrix in matrices}:
        match = tuple(matrix.name for matrix in matrices if matrix.child == child)
        changed.set(**{child: LoRA.Config(inner=getattr(changed, child), match=match, **lora)})
    return cfg.clone(block=changed)


def _shapes(cfg: Decoder.Config) -> dict[str, tuple[int, ...]]:
    from models.huggingface.convert import abstract_params

    return {name: tuple(leaf.shape) for name, leaf in by_name(abstract_params(cfg)).items()}


def _put(params: Params, path: str, array: np.ndarray) -> None:
    *folders, last = path.split(".")
    folder: Any = params
    for key in folders:
        folder = folder.setdefault(key, {})
    folder[last] = array
