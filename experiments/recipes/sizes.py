"""Sizes of a model by arithmetic, and the bytes of a device that training and rollouts of it take.

Shares of temporary arrays follow from the plans of the TPU compiler for 34 train steps (docs/reference/mesh-rules.md):
sums of what is counted here are 0.97 to 1.32 times their peaks (tests/experiments/recipes/test_sizes.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from axlearn_like.config import ConfigBase, replace, to_text
from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.block_pattern import BlockPattern, first_block
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.operations.flops import count_parameters, model_flops, rows_workload

Job = Literal["sft", "rl"]
# All parameters; all, with moments in bfloat16; LoRA factors of `RANK` on all matrices of the blocks; the same on
# int8 numbers. Moments in the host's memory are no way: no saving was shown (docs/reference/recipes.md).
Method = Literal["full", "bfloat16 moments", "lora", "int8 lora"]
FULL: tuple[Method, ...] = ("full", "bfloat16 moments")
ADAPTED: tuple[Method, ...] = ("lora", "int8 lora")
METHODS: tuple[Method, ...] = (*FULL, *ADAPTED)
RANK = 16
CHUNKS = {"sft": 8, "rl": 16}  # parts into which rows are cut for the head: the logits of one exist at a time

_ATTENTION = 1024  # tokens of a block of attention over packed rollouts

_BLOCK = 2.4  # arrays of a block that exist at a time, as a multiple of those that its layers make
_LAYER = 1.4  # bytes for each number of a layer that is gathered
_UNIT = 2.0  # bytes for each number of the others of its pattern
_UNIT_OF_LORA = 2.6  # the same where they are frozen
_EXPERTS_OF_LORA = 6.5  # bytes for each number of a layer of experts, to which factors are added
_UNIT_OF_INT8 = 9.0  # bytes for each number of a layer that is made floats of int8 numbers, and its gradient
_VOCABULARY = 10.8  # bytes for each number of embedding and head, beside parameter, gradient and moments
_EXPERTS = 14.0  # bytes for each number of a mixture of experts, alike
_SCORING = 0.8  # share of the arrays of a block and of the logits, where rollouts are scored

Bytes = dict[str, int]  # kind of arrays -> bytes of a device


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Numbers of a decoder."""

    parameters: int
    adapters: int  # LoRA factors of rank `RANK` for all matrices of its blocks
    vocabulary: int  # numbers of embedding and head
    vocab_size: int
    layers: int
    unit: int  # layers of a pattern, which one step of the scan over layers computes
    dim: int
    context: int  # width of attention's result
    hidden: int  # width of what a feed-forward network makes of a token, in all experts that it meets
    experts: int  # experts of a block; 0: none
    kv_heads: int  # key/value heads, over which tensor parallelism divides
    cache: int  # bytes of a token's keys and values, all layers, in bfloat16


_known: dict[Any, Any] = {}  # counting traces the parameters, which takes a second for some models


def model_sizes(model: Decoder.Config) -> ModelSizes:
    """Return the sizes of a decoder; nothing is allocated."""
    return _once(to_text(model), lambda: _count(model))


def row_flops(model: Decoder.Config, length: int) -> float:
    """Return the FLOPs of the forward and backward pass of a row of so many tokens."""
    make = lambda: model_flops(model, rows_workload(1, length), backward=True)  # noqa: E731
    return _once((to_text(model), length), make)


def _once[T](key: Any, make: Callable[[], T]) -> T:
    if key not in _known:
        _known[key] = make()
    return _known[key]


def with_adapters[C: ConfigBase[Any]](cfg: C, rank: int = RANK, *, int8: bool = False) -> C:
    """Change all matrices of blocks in a config to LoRA, on a base of int8 numbers if asked, and return it."""
    adapt = lambda inner: LoRA.Config(inner=inner, rank=rank, base="int8" if int8 else None)  # noqa: E731
    replace(cfg, Block.Config, lambda b: b.set(attention=adapt(b.attention), feed_forward=adapt(b.feed_forward)))
    return cfg


def _count(model: Decoder.Config) -> ModelSizes:
    block: Any = first_block(model.block)  # pyright: ignore[reportArgumentType]
    (heads, width), parameters = build_abstract(model).cache_shape, count_parameters(model)
    attention, network = block.attention, block.feed_forward
    experts = isinstance(network, MoE.Config)
    return ModelSizes(
        parameters=parameters,
        adapters=count_parameters(with_adapters(model.clone())) - parameters,
        vocabulary=model.vocab_size * model.dim * (1 if model.head is None else 2),
        vocab_size=model.vocab_size,
        layers=model.num_layers,
        unit=len(model.block.blocks) if isinstance(model.block, BlockPattern.Config) else 1,
        dim=model.dim,
        context=attention.num_heads * (getattr(attention, "head_dim", None) or model.dim // attention.num_heads),
        hidden=network.router.top_k * network.experts.hidden if experts else network.hidden,  # pyright: ignore
        experts=network.num_experts if experts else 0,
        kv_heads=heads,
        cache=4 * model.num_layers * heads * width,
    )


@dataclasses.dataclass(frozen=True)
class TrainingWay:
    """A way to train."""

    job: Job
    method: Method
    shards: int  # devices over which a parameter is sharded: fsdp x tensor
    tensor: int  # devices that share a row, and the matrices that it meets
    sequence: int  # devices that share a row by its tokens alone
    tokens: int  # tokens of the rows that such devices compute at a time
    attended: int  # the same, of rows padded to blocks of attention: its results have them
    keeps: bool  # results of attention are kept for the backward pass (remat "context"), not recomputed
    accumulated: bool  # gradients of several microbatches are summed
    copies: int = 0  # policies held beside the trained one, such as a reference
    others: int = 0  # numbers of a token and layer that are kept besides
    copied: bool = False  # several groups of devices have all parameters, so that gradients are summed over them

    @property
    def sharing(self) -> int:
        """Devices that share a row."""
        return self.tensor * self.sequence


def attended_tokens(length: int) -> int:
    """Return the tokens of a row of packed rollouts as attention pads it, to whole blocks."""
    return -(-length // _ATTENTION) * _ATTENTION


def training_bytes(sizes: ModelSizes, way: TrainingWay) -> Bytes:
    """Return what a device holds at the peak of a train step, by kind of arrays."""
    lora = way.method in ADAPTED
    trained = sizes.adapters if lora else sizes.parameters
    layer = (sizes.parameters - sizes.vocabulary) / sizes.layers
    kept = way.tokens * (sizes.dim + way.others) + (way.attended * sizes.context if way.keeps else 0)
    temporary = (_BLOCK * _block(sizes, way.tokens) + _logits(sizes, way.job, way.tokens)) / way.sharing
    temporary += (sizes.unit - 1) * _block(sizes, way.tokens) / way.sharing
    if way.shards > 1:
        temporary += _LAYER * layer / way.tensor + _others_of_unit(sizes, way)
    if lora and sizes.experts:
        temporary += _EXPERTS_OF_LORA * layer / way.tensor
    if way.method == "int8 lora":
        temporary += _UNIT_OF_INT8 * layer / way.tensor
    if not lora:
        temporary += (_VOCABULARY * sizes.vocabulary + _EXPERTS * trained * bool(sizes.experts)) / way.shards
    return {
        **_state(sizes, way),
        "gradients": round(4 * trained / way.shards * (1 + (way.accumulated or way.job == "rl") + way.copied)),
        "kept for the backward pass": round(2 * sizes.layers * kept / way.sharing),
        "temporary": round(temporary),
    }


def scoring_bytes(sizes: ModelSizes, way: TrainingWay, tokens: int) -> Bytes:
    """Return what a device holds while rollouts are scored; `tokens`: of those of devices that share rows."""
    arrays = _SCORING * (_block(sizes, tokens) + _logits(sizes, way.job, tokens)) / way.sharing
    arrays += _others_of_unit(sizes, way) if way.shards > 1 else 0
    return {**_state(sizes, way), "scoring": round(arrays)}


def _others_of_unit(sizes: ModelSizes, way: TrainingWay) -> float:
    """Return the bytes of the gathered layers of a pattern beside one of them."""
    layer = (sizes.parameters - sizes.vocabulary) / sizes.layers
    return (_UNIT_OF_LORA if way.method in ADAPTED else _UNIT) * (sizes.unit - 1) * layer / way.tensor


def engine_bytes(sizes: ModelSizes, devices: int, *, int8: bool, tokens: int) -> Bytes:
    """Return what a device of an engine holds: two versions of the weights, and pages of so many tokens."""
    blocks = sizes.parameters - sizes.vocabulary
    weights = round(((1 if int8 else 2) * blocks + 2 * sizes.vocabulary) / devices)
    pages = round(tokens * sizes.cache / min(devices, sizes.kv_heads))
    return {"weights": weights, "the next version's weights": weights, "pages": pages}


def _state(sizes: ModelSizes, way: TrainingWay) -> Bytes:
    trained = sizes.adapters if way.method in ADAPTED else sizes.parameters
    parameters = 4 * (1 + way.copies) * sizes.parameters + (4 * sizes.adapters if way.method in ADAPTED else 0)
    if way.method == "int8 lora":
        parameters -= 3 * (1 + way.copies) * (sizes.parameters - sizes.vocabulary)
    moments = (4 if way.method == "bfloat16 moments" else 8) * trained
    return {"parameters": round(parameters / way.shards), "moments": round(moments / way.shards)}


def _block(sizes: ModelSizes, tokens: int) -> float:
    return 2.0 * tokens * (4 * sizes.dim + 2 * sizes.context + 3 * sizes.hidden)


def _logits(sizes: ModelSizes, job: Job, tokens: int) -> float:
    return 4.0 * tokens / CHUNKS[job] * sizes.vocab_size
