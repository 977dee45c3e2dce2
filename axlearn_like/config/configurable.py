"""Classes with a nested `Config`, and the binding of each config class to the class that it builds."""

import types
from typing import Any

from axlearn_like.config.base import ConfigBase, is_config_class
from axlearn_like.config.errors import ConfigError


class Configurable:
    """Base of classes made by their nested `Config`: `__init__(self, cfg, **runtime)`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("Config")
        if own is None:
            own = _inherited_config(cls)
            if own is None:
                return  # An abstract base without a config.
            cls.Config = own  # pyright: ignore[reportAttributeAccessIssue]
        if not is_config_class(own):
            raise ConfigError(f"{cls.__qualname__}.Config must derive from ConfigBase, got {own!r}", cls.__qualname__)
        if own.__owner__ is not None:
            other = own.__owner__.__qualname__
            raise ConfigError(
                f"{cls.__qualname__}.Config is {own.__qualname__}, which builds {other}; "
                f"write `class Config({other}.Config): ...`",
                cls.__qualname__,
            )
        own.__owner__ = cls


def _inherited_config(cls: type) -> type[ConfigBase[Any]] | None:
    """A fresh subclass of the Config that `cls` inherits, to be bound to `cls`."""
    inherited: list[Any] = [base.__dict__.get("Config") for base in cls.__mro__[1:]]
    configs = [config for config in inherited if is_config_class(config)]
    if not configs:
        return None
    for other in configs[1:]:
        if not issubclass(configs[0], other):
            names = f"{configs[0].__qualname__} and {other.__qualname__}"
            raise ConfigError(f"{cls.__qualname__} inherits {names}; define its own Config", cls.__qualname__)
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}.Config",
        "__doc__": configs[0].__doc__,
    }
    return types.new_class("Config", (configs[0],), exec_body=lambda ns: ns.update(namespace))
