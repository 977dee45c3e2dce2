"""Blocks that are not all alike: `layer_types` of `config.json`."""

from collections.abc import Sequence
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.layers.block_pattern import BlockPattern, layer_blocks
from axlearn_like.layers.decoder import Decoder
from models.huggingface.config_json import ConfigJson

_TYPES = {"sliding_attention": True, "full_attention": False}


def read_kinds(json: ConfigJson, default: Sequence[bool]) -> tuple[bool, ...]:
    """Return which blocks of one round have a window, from `layer_types`, or the default where it is absent."""
    count = json.layers("num_hidden_layers")
    names = json.texts("layer_types")
    unknown = [name for name in names if name not in _TYPES]
    if unknown or len(names) not in (0, count):
        expected = f"{count} times {' or '.join(_TYPES)}"
        raise json.error("layer_types", expected, f"{unknown[0]!r}" if unknown else f"{len(names)} entries")
    found = [_TYPES[name] for name in names] or [default[index % len(default)] for index in range(count)]
    return tuple(found[: _period(found)])


def _period(found: Sequence[Any]) -> int:
    """Return the number of layers after which a list repeats."""
    periods = range(1, len(found) + 1)
    return next(p for p in periods if all(one == found[index % p] for index, one in enumerate(found)))


def read_windows(json: ConfigJson) -> list[int | None]:
    """Return the window of each layer of Qwen 2 and 3: from `max_window_layers` on, or as `layer_types` says."""
    count, window = json.layers("num_hidden_layers"), json.integer("sliding_window", None)
    window = window if json.flag("use_sliding_window") else None
    first = json.integer("max_window_layers", count, least=0)
    kinds = read_kinds(json, [window is not None and index >= first for index in range(count)])
    if window is None and any(kinds):
        raise json.error("layer_types", "use_sliding_window and sliding_window beside a sliding_attention", "neither")
    return [window if kinds[index % len(kinds)] else None for index in range(count)]


def in_turn(blocks: Sequence[ConfigBase[Any]]) -> ConfigBase[Any]:
    """Return the config of these layers' blocks: one, a round that repeats, or alike ones and then another kind."""
    first, rest, period = blocks[0], blocks, 1
    leading = next((index for index, block in enumerate(blocks) if block != first), 0)
    start = 0
    for start in (0, leading):
        rest = blocks[start:]
        period = _period(rest)
        if period == 1 and not start:
            return first
        if period == 1 or 2 * period <= len(rest):
            break
    return BlockPattern.Config(blocks=tuple(rest[:period]), leading=first if start else None, num_leading=start)


def write_kinds(cfg: Decoder.Config) -> dict[str, Any]:
    """Return `layer_types` and the window of a decoder. AttributeError: windows of several sizes."""
    windows = [attention.window for attention in attentions(cfg)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) != 1:
        raise AttributeError("one window for all layers that have one")
    names = {value: name for name, value in _TYPES.items()}
    return {"layer_types": [names[window is not None] for window in windows], "sliding_window": sizes.pop()}


def write_windows(cfg: Decoder.Config) -> dict[str, Any]:
    """Return the fields that `read_windows` reads. AttributeError: windows of several sizes."""
    windows = [attention.window is not None for attention in attentions(cfg)]
    if not any(windows):
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "max_window_layers": windows.index(True), **write_kinds(cfg)}


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
