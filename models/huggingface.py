"""Weights of Llama and Qwen, mixtures of experts too, from and to Hugging Face names: one table, both directions.

There, a matrix is stored [out, in], a layer and an expert have tensors of their own, and heads lie flat with the query
heads of one key/value head next to each other. Here, a matrix is [*in, *out] with the heads as axes, and layers, and in
these experts, are stacked on the first axes.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, split
from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError, did_you_mean


class ConversionError(UserError):
    """Tensors and config do not belong together; the message names the tensors."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        name: of the tensor there; `{}` is the number of the layer, a second one that of the expert.
        inputs: how many of our axes are inputs. None: a table, the same there and here. 0: a vector, flat there.
    """

    name: str
    inputs: int | None


_LAYER = "model.layers.{}"

TABLE: dict[str, Row] = {
    "embedding.weight_vd": Row("model.embed_tokens.weight", None),
    "layers.attention_norm.scale": Row(f"{_LAYER}.input_layernorm.weight", 0),
    "layers.attention.q_dkqh": Row(f"{_LAYER}.self_attn.q_proj.weight", 1),
    "layers.attention.k_dkh": Row(f"{_LAYER}.self_attn.k_proj.weight", 1),
    "layers.attention.v_dkh": Row(f"{_LAYER}.self_attn.v_proj.weight", 1),
    "layers.attention.q_bias_kqh": Row(f"{_LAYER}.self_attn.q_proj.bias", 0),
    "layers.attention.k_bias_kh": Row(f"{_LAYER}.self_attn.k_proj.bias", 0),
    "layers.attention.v_bias_kh": Row(f"{_LAYER}.self_attn.v_proj.bias", 0),
    "layers.attention.q_norm.scale": Row(f"{_LAYER}.self_attn.q_norm.weight", 0),
    "layers.attention.k_norm.scale": Row(f"{_LAYER}.self_attn.k_norm.weight", 0),
    "layers.attention.out_kqhd": Row(f"{_LAYER}.self_attn.o_proj.weight", 3),
    "layers.feed_forward_norm.scale": Row(f"{_LAYER}.post_attention_layernorm.weight", 0),
    "layers.feed_forward.gate_df": Row(f"{_LAYER}.mlp.gate_proj.weight", 1),
    "layers.feed_forward.up_df": Row(f"{_LAYER}.mlp.up_proj.weight", 1),
    "layers.feed_forward.down_fd": Row(f"{_LAYER}.mlp.down_proj.weight", 1),
    "layers.feed_forward.router.weight_de": Row(f"{_LAYER}.mlp.gate.weight", 1),
    "layers.feed_forward.experts.gate_edf": Row(f"{_LAYER}.mlp.experts.{{}}.gate_proj.weight", 1),
    "layers.feed_forward.experts.up_edf": Row(f"{_LAYER}.mlp.experts.{{}}.up_proj.weight", 1),
    "layers.feed_forward.experts.down_efd": Row(f"{_LAYER}.mlp.experts.{{}}.down_proj.weight", 1),
    "norm.scale": Row("model.norm.weight", 0),
    "head.weight_dv": Row("lm_head.weight", 1),
}


def from_huggingface(state: Mapping[str, np.ndarray], cfg: Decoder.Config) -> Params:
    """Parameters of `cfg` from tensors named as Hugging Face names them.

    Args:
        state: name -> array, of any float type.
        cfg: the decoder. Where it is tied, `lm_head.weight` may be left out, or be a copy of the embedding.

    Returns:
        Nested dict of float32 host arrays, as `split(cfg.build(...))` has them.

    Raises:
        ConversionError: tensors are missing, unknown or of another shape, or the config has a parameter that has no
            counterpart there.
    """
    abstract = jax.eval_shape(lambda: split(cfg.build(rngs=nnx.Rngs(jax.random.key(0))))[1])
    wanted = {
        name: _their_shape(shape, row.inputs)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
        for row in [_row(path)]
        for name, shape in _tensors(row, leaf.shape)
    }
    _check(state, wanted)

    def read(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        row = _row(path)
        out: np.ndarray = np.empty(leaf.shape, np.float32)
        # The stack is filled tensor by tensor: at no time are there two copies of it.
        for part, (name, shape) in zip(_parts(row, out), _tensors(row, leaf.shape), strict=True):
            tensor = np.asarray(state[name])
            part[...] = (tensor.T if row.inputs else tensor).reshape(shape)
        return out

    return jax.tree_util.tree_map_with_path(read, abstract)


def to_huggingface(params: Params, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The inverse of `from_huggingface`: name -> contiguous host array of type `dtype`, without a copy for tied heads.

    Raises:
        ConversionError: a parameter has no counterpart there.
    """
    state = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        row, array = _row(path), np.asarray(leaf)
        for part, (name, shape) in zip(_parts(row, array), _tensors(row, array.shape), strict=True):
            theirs = _their_shape(shape, row.inputs)
            flat = part.reshape(theirs[::-1]).T if row.inputs else part.reshape(theirs)
            state[name] = np.ascontiguousarray(flat, dtype=dtype)
    return state


def _row(path: Any) -> Row:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if name not in TABLE:
        raise ConversionError(f"parameter {name} has no counterpart in Hugging Face's Llama and Qwen")
    return TABLE[name]


def _tensors(row: Row, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors there of a parameter here: (name, our shape of it)."""
    stacked = row.name.count("{}")
    return [(row.name.format(*index), shape[stacked:]) for index in np.ndindex(*shape[:stacked])]


def _parts(row: Row, array: np.ndarray) -> np.ndarray:
    """Views of a parameter's parts, in the order of `_tensors`."""
    return array.reshape(-1, *array.shape[row.name.count("{}") :])


def _their_shape(shape: tuple[int, ...], inputs: int | None) -> tuple[int, ...]:
    if inputs is None:
        return shape
    return (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else (math.prod(shape),)


def _check(state: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConversionError unless `state` is exactly what is wanted (and perhaps a copy of the tied head)."""
    head, table = TABLE["head.weight_dv"].name, TABLE["embedding.weight_vd"].name
    missing = [name for name in wanted if name not in state]
    unknown = [name for name in state if name not in wanted]
    if head in unknown and table in state and np.array_equal(state[head], state[table]):
        unknown.remove(head)
    shapes = [
        f"{name} {state[name].shape}, expected {shape}"
        for name, shape in wanted.items()
        if name in state and state[name].shape != shape
    ]
    problems = []
    if missing:
        problems.append(f"missing: {_listed(missing)}")
    if unknown:
        hint = did_you_mean(unknown[0], missing) if missing else ""
        problems.append(f"unknown: {_listed(unknown)}{hint}")
    if shapes:
        problems.append(f"wrong shape: {_listed(shapes)}")
    if problems:
        raise ConversionError("these are not the tensors of this config; " + "; ".join(problems))


def _listed(names: list[str], limit: int = 8) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
