"""Blocks that are not all alike: `layer_types` of `config.json`, and tables for the segments of a decoder."""

from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_like.layers.block_pattern import layer_blocks, segment_layers
from axlearn_like.layers.decoder import Decoder
from models.huggingface.config_json import ConfigJson
from models.huggingface.rows import Row, Section

_TYPES = {"sliding_attention": True, "full_attention": False}


def read_kinds(json: ConfigJson, default: Sequence[bool]) -> tuple[bool, ...]:
    """Return which blocks of one round have a window, from `layer_types`, or the default where it is absent."""
    count = json.count("num_hidden_layers")
    names = json.texts("layer_types")
    if not names:
        return tuple(default)[:count]
    unknown = [name for name in names if name not in _TYPES]
    if unknown or len(names) != count:
        expected = f"{count} times {' or '.join(_TYPES)}"
        raise json.error("layer_types", expected, f"{unknown[0]!r}" if unknown else f"{len(names)} entries")
    found = [_TYPES[name] for name in names]
    for period in range(1, count + 1):
        if all(kind == found[index % period] for index, kind in enumerate(found)):
            return tuple(found[:period])
    raise AssertionError("a list repeats after its own length")


def write_kinds(cfg: Decoder.Config) -> dict[str, Any]:
    """Return `layer_types` and the window of a decoder. AttributeError: windows of several sizes."""
    windows = [attention.window for attention in attentions(cfg)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) != 1:
        raise AttributeError("one window for all layers that have one")
    names = {value: name for name, value in _TYPES.items()}
    return {"layer_types": [names[window is not None] for window in windows], "sliding_window": sizes.pop()}


def attentions(cfg: Decoder.Config) -> list[Any]:
    """Return the attention of each layer."""
    blocks: list[Any] = layer_blocks(cfg.block, cfg.num_layers)
    return [block.attention for block in blocks]


def first_of(cfg: Decoder.Config, window: bool) -> Any:
    """Return the first layer's attention that has a window, or has none. AttributeError: there is no such layer."""
    for attention in attentions(cfg):
        if (attention.window is not None) == window:
            return attention
    raise AttributeError("layers with and without a window")


def segment_sections(
    cfg: Decoder.Config, root: Mapping[str, Row], rows: Mapping[str, Row], leading: Mapping[str, Row] | None = None
) -> tuple[Section, ...]:
    """Return the tables of a decoder: the root's, and one for each stack of blocks; `leading`: of that stack."""
    stacks = segment_layers(cfg.block, cfg.num_layers)
    return Section("", root), *(
        Section(f"{name}.", leading if name == "leading" and leading is not None else rows, tuple(layers))
        for name, layers in stacks.items()
    )
