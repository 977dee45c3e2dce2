"""Rotary embeddings from and to `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling` before it.

A kind of scaling is a config of `axlearn_like.layers.attention.rope` or `rope_scaling`; another is refused
by name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from axlearn_like.layers.attention.rope import Llama3Scaling, Rope
from axlearn_like.layers.attention.rope_scaling import DynamicScaling, LinearScaling, YarnScaling
from models.huggingface.config_json import ConfigJson


class Scaling(NamedTuple):
    """One `rope_type`.

    Attributes:
        config: the class of its config; None: no scaling.
        read: config of the fields; the second argument is the model's `max_position_embeddings`.
        write: the fields of a config.
    """

    config: type[ConfigBase[Any]] | None
    read: Callable[[ConfigJson, int | None], ConfigBase[Any] | None]
    write: Callable[[Any], dict[str, Any]]


def _read_llama3(fields: ConfigJson, positions: int | None) -> Llama3Scaling.Config:
    del positions
    return Llama3Scaling.Config(
        factor=fields.number("factor", positive=True),
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


def _read_linear(fields: ConfigJson, positions: int | None) -> LinearScaling.Config:
    del positions
    return LinearScaling.Config(factor=fields.number("factor", positive=True))


def _read_dynamic(fields: ConfigJson, positions: int | None) -> DynamicScaling.Config:
    if positions is None:
        raise fields.error("rope_type", "max_position_embeddings in config.json beside 'dynamic'", "none")
    return DynamicScaling.Config(factor=fields.number("factor", positive=True), original_length=positions)


def _read_yarn(fields: ConfigJson, positions: int | None) -> YarnScaling.Config:
    original = fields.integer("original_max_position_embeddings", positions)
    if original is None:
        raise fields.error("original_max_position_embeddings", "an integer", "nothing")
    return YarnScaling.Config(
        factor=fields.number("factor", positive=True),
        original_length=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor", None),
        mscale=fields.number("mscale", None),
        mscale_all_dim=fields.number("mscale_all_dim", None),
        truncate=fields.flag("truncate", True),
    )


def _write_yarn(cfg: YarnScaling.Config) -> dict[str, Any]:
    some = {name: getattr(cfg, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    return {
        "factor": cfg.factor,
        "original_max_position_embeddings": cfg.original_length,
        "beta_fast": cfg.beta_fast,
        "beta_slow": cfg.beta_slow,
        "truncate": cfg.truncate,
        **{name: value for name, value in some.items() if value is not None},
    }


SCALINGS: dict[str, Scaling] = {
    "default": Scaling(None, lambda fields, positions: None, lambda cfg: {}),
    "llama3": Scaling(Llama3Scaling.Config, _read_llama3, _write_llama3),
    "linear": Scaling(LinearScaling.Config, _read_linear, lambda cfg: {"factor": cfg.factor}),
    "dynamic": Scaling(DynamicScaling.Config, _read_dynamic, lambda cfg: {"factor": cfg.factor}),
    "yarn": Scaling(YarnScaling.Config, _read_yarn, _write_yarn),
}


def read_rope(json: ConfigJson, theta: float = 10_000.0) -> Rope.Config:
    """Return the rotary embedding of a model that has one for all layers; `theta`: the architecture's default."""
    positions = json.integer("max_position_embeddings", None)
    new, old = json.nested("rope_parameters"), json.nested("rope_scaling")
    base = json.number("rope_theta", theta, positive=True)
    fields = new or old
    if new and old and _kind(new) is not _kind(old):
        raise json.error("rope_scaling", "the rope type of rope_parameters", "another")
    if fields is None:
        return Rope.Config(theta=base, max_length=positions)
    return rope_of(fields, base, positions)


def rope_of(fields: ConfigJson, theta: float, positions: int | None) -> Rope.Config:
    """Return the rotary embedding that an object of fields describes; `theta` where it says none."""
    kind = _kind(fields)
    fields.ignore("type", "rope_type")
    scaling: Any = kind.read(fields, positions)
    fields.only("partial_rotary_factor", 1, 1.0)
    rope = Rope.Config(theta=fields.number("rope_theta", theta, positive=True), scaling=scaling, max_length=positions)
    unread = fields.unread()
    if unread:
        raise fields.error(unread[0], "no such field for this rope type", "an unknown one")
    return rope


def _kind(fields: ConfigJson) -> Scaling:
    """Return the kind of scaling that an object of fields names (ConfigJsonError)."""
    return fields.choice("rope_type" if "rope_type" in fields or "type" not in fields else "type", SCALINGS, "default")


def rope_parameters(cfg: Rope.Config) -> dict[str, Any]:
    """Return the object of fields that `rope_of` reads."""
    for name, kind in SCALINGS.items():
        if (kind.config is None and cfg.scaling is None) or (kind.config and isinstance(cfg.scaling, kind.config)):
            return {"rope_type": name, "rope_theta": cfg.theta, **kind.write(cfg.scaling)}
    raise AssertionError(f"no rope type for {cfg.scaling}")


def write_rope(cfg: Rope.Config) -> dict[str, Any]:
    """Return the fields of `config.json`, in the form of transformers 5, which older ones read too."""
    parameters = rope_parameters(cfg)
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    # Before version 5 the base was a field of its own, and `rope_scaling` null without scaling.
    old = None if cfg.scaling is None else scaling
    return {"rope_parameters": parameters, "rope_theta": cfg.theta, "rope_scaling": old}
