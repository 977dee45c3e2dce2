"""Rotary embeddings from and to `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling` before it.

A kind of scaling is a config of `axlearn_like.layers.attention.rope`; one that has no entry here is refused by name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from axlearn_like.layers.attention.rope import Llama3Scaling, Rope
from models.huggingface.config_json import ConfigJson


class Scaling(NamedTuple):
    """One `rope_type`.

    Attributes:
        config: its class here; None: no scaling.
        read: config of the fields; the second argument is the model's `max_position_embeddings`.
        write: the fields of a config.
    """

    config: type[ConfigBase[Any]] | None
    read: Callable[[ConfigJson, int | None], ConfigBase[Any] | None]
    write: Callable[[Any], dict[str, Any]]


def _read_llama3(fields: ConfigJson, positions: int | None) -> Llama3Scaling.Config:
    del positions
    return Llama3Scaling.Config(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_length=fields.integer("original_max_position_embeddings"),
    )


def _write_llama3(cfg: Llama3Scaling.Config) -> dict[str, Any]:
    return {
        "factor": cfg.factor,
        "low_freq_factor": cfg.low_freq_factor,
        "high_freq_factor": cfg.high_freq_factor,
        "original_max_position_embeddings": cfg.original_length,
    }


SCALINGS: dict[str, Scaling] = {
    "default": Scaling(None, lambda fields, positions: None, lambda cfg: {}),
    "llama3": Scaling(Llama3Scaling.Config, _read_llama3, _write_llama3),
}


def read_rope(json: ConfigJson, theta: float = 10_000.0) -> Rope.Config:
    """Return the rotary embedding of a model that has one for all layers; `theta`: the architecture's default."""
    positions = json.integer("max_position_embeddings", None)
    new, old = json.nested("rope_parameters"), json.nested("rope_scaling")
    base = json.number("rope_theta", theta)
    fields = new or old
    if fields is None:
        return Rope.Config(theta=base, max_length=positions)
    return rope_of(fields, base, positions)


def rope_of(fields: ConfigJson, theta: float, positions: int | None) -> Rope.Config:
    """Return the rotary embedding that an object of fields describes; `theta` where it says none."""
    kind = fields.choice("rope_type" if "rope_type" in fields or "type" not in fields else "type", SCALINGS, "default")
    fields.ignore("type", "rope_type")
    scaling: Any = kind.read(fields, positions)
    fields.only("partial_rotary_factor", 1, 1.0)
    rope = Rope.Config(theta=fields.number("rope_theta", theta), scaling=scaling, max_length=positions)
    unread = fields.unread()
    if unread:
        raise fields.error(unread[0], "no such field for this rope type", "one that is not known here")
    return rope


def write_rope(cfg: Rope.Config) -> dict[str, Any]:
    """Return the fields of `config.json`, in the form of transformers 5, which older ones read too."""
    for name, kind in SCALINGS.items():
        if (kind.config is None and cfg.scaling is None) or (kind.config and isinstance(cfg.scaling, kind.config)):
            scaling = kind.write(cfg.scaling)
            parameters = {"rope_type": name, "rope_theta": cfg.theta, **scaling}
            # Before version 5 the base was a field of its own, and `rope_scaling` null without scaling.
            old = {"rope_type": name, **scaling} if scaling else None
            return {"rope_parameters": parameters, "rope_theta": cfg.theta, "rope_scaling": old}
    raise AssertionError(f"no rope type for {cfg.scaling}")
