"""Fields of config classes: what may be one, its annotation, and the error of one that does not exist."""

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from axlearn_like.config.errors import AnnotationError, ConfigError, FieldError
from axlearn_like.config.tree import Node, clone
from mesh.errors import did_you_mean


class RequiredType:
    """The type of REQUIRED, the mark of a field that must be set before its owner is built."""

    def __repr__(self) -> str:
        return "REQUIRED"

    def __bool__(self) -> bool:
        raise ConfigError("a REQUIRED config field was used before it was set")

    def __reduce__(self) -> str:
        return "REQUIRED"  # Copies and pickles are the one instance.


REQUIRED: Any = RequiredType()

_PLAIN = (Node, RequiredType, bool, int, float, str, tuple, list, dict, type(None))


def prepare_fields(cls: type[Node], base: type[Node]) -> None:
    """Turn mutable defaults into factories and refuse what would silently not be a field, or hide a name of `base`."""
    annotations = inspect.get_annotations(cls)
    for name in annotations:
        if hasattr(base, name):
            path = f"{cls.__qualname__}.{name}"
            raise ConfigError(f"{path}: the name is taken by {base.__name__}.{name}", path)
        default = cls.__dict__.get(name)
        if isinstance(default, (Node, tuple)) or type(default).__hash__ is None:
            factory = functools.partial(clone, default)
            setattr(cls, name, dataclasses.field(default_factory=factory))
    for name, value in cls.__dict__.items():
        if name not in annotations and not name.startswith("_") and isinstance(value, _PLAIN):
            path = f"{cls.__qualname__}.{name}"
            raise ConfigError(f"{path} = {value!r} has no annotation: not a field", path)


@functools.cache
def field_hint(cls: type[Node], name: str) -> Any:
    """The annotation of a field, resolved on first use: it may name a class defined further down.

    Raises:
        AnnotationError: a name in the annotation does not exist at run time.
    """
    annotation = cls.__dataclass_fields__[name].type
    home = next(c for c in cls.__mro__ if name in c.__dict__.get("__annotations__", {}))
    owner = getattr(home, "__owner__", None)
    names: dict[str, Any] = {}
    if isinstance(owner, type):
        names |= {owner.__name__: owner, **vars(owner)}
    names |= {**vars(home), home.__name__: home}
    # Only types: a method called `set` must not hide the builtin that an annotation means.
    kinds = (type, typing.TypeAliasType)
    names = {k: v for k, v in names.items() if isinstance(v, kinds) or typing.get_origin(v)}
    module = vars(sys.modules[home.__module__]) if home.__module__ in sys.modules else {}
    carrier = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return typing.get_type_hints(carrier, {**module, **names})[name]
    except NameError as error:
        path = f"{cls.__qualname__}.{name}"
        raise AnnotationError(
            f"{path}: its annotation {annotation!r} names {error.name!r}, "
            f"which {home.__module__} lacks at run time; import or define it at module level",
            path,
        ) from error


def note_renamed(cls: type[Node], renamed: Mapping[str, str]) -> None:
    """Declare earlier names of a class's fields, for the class and those that inherit from it.

    Raises:
        ConfigError: an earlier name is a field, or its new name is none.
    """
    for old, new in renamed.items():
        if old in cls.__dataclass_fields__ or new not in cls.__dataclass_fields__:
            path = f"{cls.__qualname__}.{old}"
            raise ConfigError(f"{path}: expected an earlier name of a field, got renamed to {new!r}", path)
    cls.__renamed__ = {**cls.__renamed__, **renamed}


def unknown_field(cls: type[Node], name: str, path: str | None = None) -> FieldError:
    """The error of a renamed field, with its name now, or of a misspelt one, with the nearest names."""
    where, known = path or cls.__qualname__, list(cls.__dataclass_fields__)
    if name in cls.__renamed__:
        return FieldError(f"{where}: {name} is now {cls.__renamed__[name]}", f"{where}.{name}")
    return FieldError(f"{where} has no field {name!r}{did_you_mean(name, known, limit=len(known))}", f"{where}.{name}")
