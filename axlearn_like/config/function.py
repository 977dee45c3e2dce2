"""Configs of third-party functions: `config_for(optax.adamw, learning_rate=3e-4).build()` calls it.

The fields are the function's parameters: those without a default are REQUIRED, `*args` is a tuple
and `**kwargs` a dict under the parameter's own name. Configs among the values are built first:

    clip = config_for(optax.clip_by_global_norm, max_norm=1.0)
    config_for(optax.chain, args=(clip, config_for(optax.adamw, learning_rate=3e-4)))

A foreign annotation helps to parse text from the command line but refuses no value: the function is
the judge of its arguments, and many annotations in the wild are narrower than what is accepted.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, cast

from axlearn_like.config.base import ConfigBase, is_config
from axlearn_like.config.errors import ConfigError
from axlearn_like.config.fields import REQUIRED
from axlearn_like.config.tree import config_items, is_dict


class FunctionConfig[T](ConfigBase[T]):
    """A call of a function; each function has its own subclass, made by `config_class`."""

    def _checked(self, name: str, value: Any) -> Any:
        return value

    def _given_at_build(self, name: str, runtime: Mapping[str, Any]) -> bool:
        return name in runtime

    def _make(self, runtime: dict[str, Any]) -> Any:
        """Call the function; a runtime argument takes the place of the field of its name."""
        function = type(self).__owner__
        fields = {k: v for k, v in config_items(self) if k not in runtime}
        values = {name: _build_configs(value) for name, value in fields.items()} | runtime
        parameters = inspect.signature(function).parameters
        variadic = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values())
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for name, parameter in parameters.items():
            value = values.pop(name)
            if parameter.kind is Parameter.VAR_KEYWORD:
                keywords |= value
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                positional += value
            elif (
                parameter.kind is Parameter.POSITIONAL_ONLY
                or parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
                and variadic
            ):
                positional.append(value)
            else:
                keywords[name] = value
        return function(*positional, **keywords, **values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self).__owner__, self.__dict__)


def config_for[R](function: Callable[..., R], **values: Any) -> FunctionConfig[R]:
    """The config of a call of `function` with these arguments.

    Raises:
        ConfigError: the function does not take an argument (gives the nearest names), or it has no signature.
    """
    return config_class(function)(**values)


@functools.cache
def config_class(function: Callable[..., Any]) -> type[FunctionConfig[Any]]:
    """The config class of a function; always the same, so that equal calls have equal configs."""
    name = getattr(function, "__qualname__", None)
    if name is None:
        raise ConfigError(f"config_for needs a function or a class, got {function!r}")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ConfigError(f"config_for({name}): the function has no signature to read", name) from error
    hints = _hints(function)
    namespace: dict[str, Any] = {
        "__module__": function.__module__,
        "__qualname__": f"{name}.Config",
        "__doc__": function.__doc__,
        "__annotations__": {},
    }
    for parameter in parameters.values():
        annotation, default = _field(parameter, hints.get(parameter.name, Any))
        namespace["__annotations__"][parameter.name] = annotation
        namespace[parameter.name] = default
    cls = types.new_class("Config", (FunctionConfig,), exec_body=lambda ns: ns.update(namespace))
    cls.__owner__ = function
    return cls


def _field(parameter: Parameter, hint: Any) -> tuple[Any, Any]:
    """(annotation, default) of a parameter's field."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return tuple[hint, ...], ()
    if parameter.kind is Parameter.VAR_KEYWORD:
        return dict[str, hint], {}
    if parameter.default is Parameter.empty:
        return hint, REQUIRED
    if hint is Any and parameter.default is not None:
        hint = cast(Any, type(parameter.default))
    return hint, parameter.default


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        source = function.__init__ if isinstance(function, type) else function
        return typing.get_type_hints(source)
    except (NameError, TypeError, AttributeError):
        return {}  # Names imported for type checkers only: text is then read as a Python literal.


def _build_configs(value: Any) -> Any:
    if is_config(value):
        return value.build()
    if type(value) in (list, tuple):
        return type(value)(_build_configs(v) for v in value)
    if is_dict(value) and type(value) is dict:
        return {k: _build_configs(v) for k, v in value.items()}
    return value


def _restore(function: Callable[..., Any], values: dict[str, Any]) -> FunctionConfig[Any]:
    cfg = object.__new__(config_class(function))
    cfg.__dict__.update(values)
    return cfg
