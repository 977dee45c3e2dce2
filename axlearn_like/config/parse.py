"""Text from a command line to a config value, as the field's annotation asks.

`3e-4` is a float where a float is declared and a string where a string is. A nested config is named
by its owner (`axlearn_like.layers.rope:Rope`), which swaps the component; a function by `module:name`.
"""

import ast
import collections.abc
import types
import typing
from typing import Any, Literal

from axlearn_like.config.base import ConfigBase
from axlearn_like.config.checks import CALLABLE, check, describe
from axlearn_like.config.errors import ConfigError, ImportNameError
from axlearn_like.config.names import config_from_name, import_name

_ORDER = (types.NoneType, bool, int, float, Literal)


def parse_value(text: str, hint: Any, where: str) -> Any:
    """The value that `text` stands for in a field annotated `hint`.

    Raises:
        ConfigError: names `where`, the annotation and the text.
    """
    reasons: list[str] = []
    for alternative in sorted(alternatives(hint), key=_rank):
        try:
            return check(_parse(text, alternative, where), alternative, where)
        except ImportNameError as error:  # Why it cannot be imported is worth saying.
            reasons.append(str(error).removeprefix(f"{where}: "))
        except (ConfigError, ValueError):
            continue
    reason = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
    raise ConfigError(f"{where}: expected {describe(hint)}, got {text!r}{reason}", where)


def element_hint(hint: Any, key: Any) -> Any:
    """The annotation of a container's element at `key`; Any when the annotation does not say."""
    for alternative in alternatives(hint):
        origin, args = typing.get_origin(alternative), typing.get_args(alternative)
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            if isinstance(key, int) and key < len(args):
                return args[key]
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
            return args[1]
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            return args[0]
    return Any


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if isinstance(hint, typing.TypeAliasType):
        return alternatives(hint.__value__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(a for member in typing.get_args(hint) for a in alternatives(member))
    return (hint,)


def _rank(hint: Any) -> int:
    """The strictest reading first; any text at all is a string."""
    kind = Literal if typing.get_origin(hint) is Literal else hint
    if kind in _ORDER:
        return _ORDER.index(kind)
    return {str: 99, Any: 98, object: 98}.get(kind, len(_ORDER))


def _parse(text: str, hint: Any, where: str) -> Any:
    origin = typing.get_origin(hint) or hint
    if origin is str:
        return _unquoted(text)
    if origin is types.NoneType or origin is bool:
        return {"none": None, "true": True, "false": False}.get(text.strip().lower(), text)
    if origin is int:
        return int(text, 0)
    if origin is float:
        return float(text)
    if origin is Literal:
        choices = typing.get_args(hint)
        return next((c for c in choices if text == str(c)), _unquoted(text))
    if origin is type or origin is CALLABLE:
        return import_name(text.removeprefix("class "), where)
    if isinstance(origin, type) and issubclass(origin, ConfigBase):
        return config_from_name(text, where)()
    if origin in (tuple, list, collections.abc.Sequence):
        return _parse_sequence(text, hint, origin, where)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _parse_sequence(text: str, hint: Any, origin: Any, where: str) -> Any:
    """A Python literal, or elements between commas: `4,2`, `[4, 2]`, `math,logic`, `4`."""
    make: Any = list if origin is list else tuple
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        words = [word.strip() for word in text.strip("()[] ").split(",")]
        return make(parse_value(w, element_hint(hint, i), f"{where}[{i}]") for i, w in enumerate(words) if w)
    return make(value if isinstance(value, (list, tuple)) else (value,))


def _unquoted(text: str) -> str:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, str) else text
