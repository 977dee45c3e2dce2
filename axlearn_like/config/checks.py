"""Run-time checks of config values against their annotations.

`check` accepts exactly what the annotation says, with two comforts: an `int` becomes a `float`
where a float is declared, and a subclass of a number or a string (numpy's `float64`) becomes the
plain one. A `bool` is never an `int`. Containers are checked element by element, and an error names
the element.
"""

import collections.abc
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, Union

from axlearn_like.config.errors import ConfigError

CALLABLE: Any = collections.abc.Callable  # value of `get_origin`


def check(value: Any, hint: Any, where: str) -> Any:
    """Return `value`, converted where the annotation asks for it.

    Raises:
        ConfigError: names `where`, the annotation and the value that does not fit.
    """
    if hint is Any or hint is object or isinstance(hint, typing.TypeVar):
        return value
    if isinstance(hint, typing.TypeAliasType):
        return check(value, hint.__value__, where)
    if isinstance(hint, typing.NewType):
        return check(value, hint.__supertype__, where)
    if hint is None or hint is types.NoneType:
        if value is None:
            return None
        raise mismatch(value, hint, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union or origin is types.UnionType:
        return _check_union(value, hint, args, where)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        raise mismatch(value, hint, where)
    if origin is None:
        return _check_plain(value, hint, where)
    return _check_generic(value, hint, origin, args, where)


def _check_plain(value: Any, hint: Any, where: str) -> Any:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if hint is str and isinstance(value, str):
        return str(value)
    if hint is CALLABLE:
        if callable(value):
            return value
        raise mismatch(value, hint, where)
    if hint in (int, float) or not isinstance(hint, type):
        raise mismatch(value, hint, where)
    if getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False):
        return value  # Python cannot check it; the type checker does.
    if not isinstance(value, hint):
        raise mismatch(value, hint, where)
    return value


def _check_union(value: Any, hint: Any, args: tuple[Any, ...], where: str) -> Any:
    """A member that keeps the value's type wins: 3 stays an int in `float | int`."""
    converted: list[Any] = []
    errors: list[ConfigError] = []
    for member in args:
        try:
            result = check(value, member, where)
        except ConfigError as error:
            # `tuple[int, ...] | None` given ("a",): the element's error says more than the union's.
            if _same_shape(value, member):
                errors.append(error)
            continue
        if type(result) is type(value):
            return result
        converted.append(result)
    if converted:
        return converted[0]
    raise errors[0] if len(errors) == 1 else mismatch(value, hint, where)


def _same_shape(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return origin in (tuple, list, dict) and isinstance(value, origin)


def _check_generic(value: Any, hint: Any, origin: Any, args: tuple[Any, ...], where: str) -> Any:
    if origin is CALLABLE:
        return _check_plain(value, origin, where)
    if origin is type:
        return _check_class(value, hint, args, where)
    matches_alias = getattr(origin, "_matches_alias", None)
    if matches_alias is not None:
        if matches_alias(value, args):
            return value
        raise mismatch(value, hint, where)
    if origin is tuple:
        return _check_tuple(value, hint, args, where)
    if not isinstance(origin, type) or not isinstance(value, origin) or isinstance(value, str):
        raise mismatch(value, hint, where)
    if _is_mapping(value):
        key_hint, value_hint = args
        return {
            check(k, key_hint, f"{where} key {k!r}"): check(v, value_hint, f"{where}[{k!r}]") for k, v in value.items()
        }
    if _is_collection(value):
        make: Any = type(value)
        return make(check(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
    return value


def _check_tuple(value: Any, hint: Any, args: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not _is_collection(value) or not isinstance(value, tuple):
        raise mismatch(value, hint, where)
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    elif len(args) != len(value):
        raise mismatch(value, hint, where)
    return tuple(check(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, args, strict=True)))


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_collection(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]]:
    return isinstance(value, (list, tuple, set, frozenset))


def _check_class(value: Any, hint: Any, args: tuple[Any, ...], where: str) -> Any:
    is_union = typing.get_origin(args[0]) in (Union, types.UnionType)
    bounds = typing.get_args(args[0]) if is_union else args
    bound = tuple(typing.get_origin(b) or b for b in bounds)
    if isinstance(value, type) and (Any in bound or issubclass(value, bound)):
        return value
    raise mismatch(value, hint, where)


def mismatch(value: Any, hint: Any, where: str) -> ConfigError:
    """The error of a value that does not fit its annotation."""
    kind = type(value).__qualname__
    return ConfigError(f"{where}: expected {describe(hint)}, got {value!r} ({kind})", where)


def describe(hint: Any) -> str:
    """An annotation as a reader would write it: `tuple[int, ...] | None`."""
    if hint is types.NoneType:
        return "None"
    if hint is Ellipsis:
        return "..."
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union or origin is types.UnionType:
        return " | ".join(describe(a) for a in args)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is CALLABLE:
        return "Callable"
    if origin is not None and args:
        return f"{origin.__qualname__}[{', '.join(describe(a) for a in args)}]"
    return getattr(hint, "__qualname__", None) or str(hint)
