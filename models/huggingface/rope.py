"""Rotary embeddings from and to `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling` before it.

A kind of scaling is a config of `axlearn_like.layers.attention.rope` or `rope_scaling`; another is refused
by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from axlearn_like.config import ConfigBase
from axlearn_like.layers.attention.rope import Llama3Scaling, Rope
from axlearn_like.layers.attention.rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, YarnScaling
from models.huggingface.config_json import ConfigJson


class Lengths(NamedTuple):
    """Lengths of a model's sequences, as `config.json` says beside the fields of its rotary embedding."""

    positions: int | None  # `max_position_embeddings`
    before: int | None  # `original_max_position_embeddings`, which goes before the field of the same name within

    def original(self, fields: ConfigJson) -> int:
        """Return the length before the model was stretched; without any it is that of now (ConfigJsonError)."""
        within = fields.integer("original_max_position_embeddings", self.positions)
        found = self.before or within
        if found is None:
            raise fields.error("original_max_position_embeddings", "an integer", "nothing")
        return found

    def factor(self, fields: ConfigJson) -> float:
        """Return the factor by which the model was stretched, by default that of the two lengths."""
        found = fields.number("factor", None, positive=True)
        return found or (self.positions or 0) / self.original(fields) or 1.0


# Reads a field of an object of fields by its name, given the lengths beside that.
Reader = Callable[[ConfigJson, str, Lengths], Any]


class Scaling(NamedTuple):
    """One `rope_type`, both ways."""

    config: type[ConfigBase[Any]] | None = None  # the class of its config; None: no scaling
    # Field of `config.json` -> field of the config, and how it is read; written where it is not None
    fields: Mapping[str, tuple[str, Reader]] = {}

    def read(self, json: ConfigJson, lengths: Lengths) -> Any:
        """Return the config that an object of fields describes (ConfigJsonError)."""
        found = {field: read(json, name, lengths) for name, (field, read) in self.fields.items()}
        return None if self.config is None else self.config(**found)

    def write(self, cfg: Any) -> dict[str, Any]:
        """Return the fields of a config."""
        found = {name: getattr(cfg, field) for name, (field, _) in self.fields.items()}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return {name: value for name, value in listed.items() if value is not None}


_FACTOR: tuple[str, Reader] = ("factor", lambda json, name, _: json.number(name, positive=True))
_STRETCH: tuple[str, Reader] = ("factor", lambda json, name, lengths: lengths.factor(json))
_ORIGINAL: tuple[str, Reader] = ("original_length", lambda json, name, lengths: lengths.original(json))
_NEEDED: Reader = lambda json, name, _: json.number(name)  # noqa: E731
_OPTIONAL: Reader = lambda json, name, _: json.number(name, None)  # noqa: E731
_LISTED: Reader = lambda json, name, _: json.numbers(name)  # noqa: E731
SCALINGS: dict[str, Scaling] = {
    "default": Scaling(),
    "llama3": Scaling(
        Llama3Scaling.Config,
        {
            "factor": _FACTOR,
            "low_freq_factor": ("low_freq_factor", _NEEDED),
            "high_freq_factor": ("high_freq_factor", _NEEDED),
            "original_max_position_embeddings": _ORIGINAL,
        },
    ),
    "linear": Scaling(LinearScaling.Config, {"factor": _FACTOR}),
    "dynamic": Scaling(DynamicScaling.Config, {"factor": _FACTOR}),
    "yarn": Scaling(
        YarnScaling.Config,
        {
            "factor": _STRETCH,
            "original_max_position_embeddings": _ORIGINAL,
            "beta_fast": ("beta_fast", lambda json, name, _: json.number(name, None) or 32.0),
            "beta_slow": ("beta_slow", lambda json, name, _: json.number(name, None) or 1.0),
            "truncate": ("truncate", lambda json, name, _: json.flag(name, True)),
            **{name: (name, _OPTIONAL) for name in ("attention_factor", "mscale", "mscale_all_dim")},
        },
    ),
    "longrope": Scaling(
        LongRopeScaling.Config,
        {
            "short_factor": ("short_factor", _LISTED),
            "long_factor": ("long_factor", _LISTED),
            "factor": _STRETCH,
            "original_max_position_embeddings": _ORIGINAL,
            "attention_factor": ("attention_factor", _OPTIONAL),
        },
    ),
}


def read_rope(json: ConfigJson) -> Rope.Config:
    """Return the rotary embedding of a model that has one for all layers."""
    lengths, default = read_lengths(json), json.defaults.get("rope_parameters") or {}
    # A field of its own before transformers 5, and then the base of what names none.
    theta = json.number("rope_theta", default.get("rope_theta", 10_000.0), positive=True)
    found = [rope_of(one, theta, lengths) for one in map(json.nested, ("rope_scaling", "rope_parameters")) if one]
    if not found:
        return rope_of(ConfigJson({**default, "rope_theta": theta}), theta, lengths)
    if found[0] != found[-1]:
        raise json.error("rope_scaling", "the rotary embedding of rope_parameters, or one of the two", "another")
    return found[0]


def read_lengths(json: ConfigJson) -> Lengths:
    """Return the lengths; refuse what would be said for all rotary embeddings (ConfigJsonError)."""
    _refuse_part(json)
    return Lengths(
        json.integer("max_position_embeddings", None), json.integer("original_max_position_embeddings", None)
    )


def rope_of(fields: ConfigJson, theta: float, lengths: Lengths) -> Rope.Config:
    """Return the rotary embedding that an object of fields describes; `theta` where it says none."""
    kind = _kind(fields)
    fields.ignore("type", "rope_type")
    scaling: Any = kind.read(fields, lengths)
    if isinstance(scaling, DynamicScaling.Config):
        if lengths.positions is None:
            raise fields.error("rope_type", "max_position_embeddings in config.json beside 'dynamic'", "none")
        scaling.original_length = lengths.positions
    _refuse_part(fields)
    rope = Rope.Config(
        theta=fields.number("rope_theta", theta, positive=True), scaling=scaling, max_length=lengths.positions
    )
    if isinstance(scaling, LongRopeScaling.Config):  # a longer one has other frequencies, for short sequences too
        rope.max_length = scaling.original_length
    unread = fields.unread()
    if unread:
        raise fields.error(unread[0], "no such field for this rope type", "an unknown one")
    return rope


def _refuse_part(fields: ConfigJson) -> None:
    part = fields.number("partial_rotary_factor", 1.0)
    if part != 1:
        expected = "1, or no such field (in these architectures transformers rotates whole heads, other engines a part)"
        raise fields.error("partial_rotary_factor", expected, f"{part}")


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
    found = {"rope_parameters": parameters, "rope_theta": cfg.theta, "rope_scaling": old}
    if isinstance(cfg.scaling, LongRopeScaling.Config):
        found["max_position_embeddings"] = round(cfg.scaling.factor * cfg.scaling.original_length)
    if isinstance(cfg.scaling, DynamicScaling.Config):  # original length of a stretched model
        found["max_position_embeddings"] = cfg.scaling.original_length
    return found
