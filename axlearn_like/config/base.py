"""Typed configs: a class has a nested `Config`, and `Config(...).build(...)` makes the object.

    class Mlp(Configurable):
        class Config(ConfigBase["Mlp"]):
            dim: int = REQUIRED  # the parent sets it when it builds
            hidden: int = 256

        def __init__(self, cfg: Config): ...

    mlp = Mlp.Config(dim=64).build()

A `Config` becomes a keyword-only dataclass by itself. Values are checked against the annotations
whenever they are set and once more at `build`, which hands the owner a private copy. A parent fills
what only it knows (`cfg.mlp.set(dim=cfg.dim).build()`), so a tree may hold REQUIRED fields until
its parents build it. A config placed in a tree is not copied; a tree is copied by `clone` and
`build`.

A class that inherits its `Config` gets a subclass of it bound to itself, so that
`Child.Config().build()` is a `Child`; to add fields write `class Config(Parent.Config)`.
"""

import copy
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from axlearn_like.config.checks import check
from axlearn_like.config.errors import AnnotationError, ConfigError, FieldError, mark_path
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

# While set, `build` reports (path, the owner's private config) of everything it has built.
on_built: ContextVar[Callable[[str, "ConfigBase[Any]"], None] | None] = ContextVar("on_built", default=None)


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class ConfigBase[T]:
    """Base of every `Config`; `T` is the class that `build` makes."""

    _owner: ClassVar[Any] = None
    _hints: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._owner = None
        cls._hints = {}
        _prepare_fields(cls)
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)

    if not TYPE_CHECKING:  # The type checker knows a better signature, made from the fields.

        def __init__(self, **values: Any) -> None:
            fields = dataclasses.fields(self)
            unknown = values.keys() - {f.name for f in fields}
            if unknown:
                raise self._unknown_field(min(unknown))
            missing = []
            for f in fields:
                if f.name in values:
                    setattr(self, f.name, values[f.name])
                elif f.default_factory is not dataclasses.MISSING:
                    self._set_default(f.name, f.default_factory())
                elif f.default is not dataclasses.MISSING:
                    self._set_default(f.name, f.default)
                else:
                    missing.append(f.name)
            if missing:
                where = type(self).__qualname__
                raise ConfigError(f"{where} needs {', '.join(missing)}", f"{where}.{missing[0]}")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # Protocols of copy, pickle and notebooks probe for these.
                raise AttributeError(name)
            computed = inspect.getattr_static(type(self), name, None)
            if isinstance(computed, property) and computed.fget is not None:
                return computed.fget(self)  # It failed inside: let its own error be seen.
            raise self._unknown_field(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
            raise self._unknown_field(name)
        self.__dict__[name] = self._checked(name, value)

    def __delattr__(self, name: str) -> None:
        path = f"{type(self).__qualname__}.{name}"
        raise FieldError(f"{path}: a config field cannot be deleted", path)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return dict(config_items(self)) == dict(config_items(typing.cast(Self, other)))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{k}={v!r}' for k, v in config_items(self))})"

    def set(self, **values: Any) -> Self:
        """Set fields in place; either all of them or, on an error, none."""
        for name in values:
            if name not in type(self).__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
                raise self._unknown_field(name)
        self.__dict__.update({name: self._checked(name, value) for name, value in values.items()})
        return self

    def clone(self, **values: Any) -> Self:
        """A deep copy with `values` set. A config that stood in two places becomes two."""
        return _clone(self).set(**values)

    def build(self, **runtime: Any) -> T:
        """Make the owner from a private copy of this config: `owner(cfg, **runtime)`.

        Raises:
            ConfigError: names every REQUIRED field of this config that is not set, with its path.
        """
        cfg = _clone(self)
        if type(cfg)._owner is None:
            name = type(cfg).__qualname__
            raise ConfigError(f"{name} belongs to no class: nothing to build", name)
        path = cfg._path or owner_name(cfg)
        label(cfg, path)
        cfg._check_ready(path, runtime)
        try:
            built = cfg._make(runtime)
        except Exception as error:
            mark_path(error, path)
            raise
        report = on_built.get()
        if report is not None:
            report(path, cfg)
        return built

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot work, before anything expensive is begun.

        A program calls it once, at the root. It goes from the top down: an override looks at its own fields, then
        calls `check` of its children with what only it knows (a mesh, sizes). By default the owner is built, with the
        arguments of `build`: constructors refuse fields that make no sense, and most allocate nothing. What is
        expensive to build (an experiment, a trainer, an engine) overrides this.

        Raises:
            UserError: names the field by its path, what was expected, and what it is.
        """
        self.build(*args, **kwargs)

    def filled_from(self, parent: "ConfigBase[Any]", **values: Any) -> Self:
        """A copy with `values` set, and each field that is declared REQUIRED from the parent's field of its name."""
        known = dict(config_items(parent))
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        wanted = [f.name for f in fields if f.default is REQUIRED and f.name in known]
        return self.clone(**{name: known[name] for name in wanted if name not in values}, **values)

    def _make(self, runtime: dict[str, Any]) -> Any:
        return type(self)._owner(self, **runtime)

    def _check_ready(self, path: str, runtime: Mapping[str, Any]) -> None:
        missing = []
        for name, value in config_items(self):
            if value is not REQUIRED:
                # Checked again: a default whose annotation did not resolve yet, a list appended to.
                self.__dict__[name] = self._checked(name, value)
            elif not self._given_at_build(name, runtime):
                missing.append(f"{path}.{name}")
        if missing:
            verb, cls = "is" if len(missing) == 1 else "are", type(self).__qualname__
            raise ConfigError(f"{', '.join(missing)} {verb} REQUIRED by {cls} and not set", missing[0])

    def _given_at_build(self, name: str, runtime: Mapping[str, Any]) -> bool:
        del name, runtime
        return False  # A class reads its fields from its config alone.

    @property
    def _path(self) -> str | None:
        return self.__dict__.get("_label")

    def _checked(self, name: str, value: Any) -> Any:
        if value is REQUIRED:
            return value
        where = self._path or type(self).__qualname__
        return check(value, field_hint(type(self), name), f"{where}.{name}")

    def _set_default(self, name: str, value: Any) -> None:
        try:
            value = self._checked(name, value)
        except AnnotationError:
            pass  # The annotation names a class further down the module: `build` checks it.
        self.__dict__[name] = value

    def _unknown_field(self, name: str) -> FieldError:
        return unknown_field(type(self), name, self._path)

    @classmethod
    def _matches_alias(cls, value: Any, args: tuple[Any, ...]) -> bool:
        """Return True if `value` fits the annotation `ConfigBase[X]`: a config of a class that is an X."""
        wanted = args[0]
        if not isinstance(value, cls):
            return False
        owner = type(value)._owner
        known = isinstance(wanted, type) and isinstance(owner, type)
        return issubclass(owner, wanted) if known else True


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
        if not (isinstance(own, type) and issubclass(own, ConfigBase)):
            raise ConfigError(f"{cls.__qualname__}.Config must derive from ConfigBase, got {own!r}", cls.__qualname__)
        if own._owner is not None:
            other = own._owner.__qualname__
            raise ConfigError(
                f"{cls.__qualname__}.Config is {own.__qualname__}, which builds {other}; "
                f"write `class Config({other}.Config): ...`",
                cls.__qualname__,
            )
        own._owner = cls


def _inherited_config(cls: type) -> type[ConfigBase[Any]] | None:
    """A fresh subclass of the Config that `cls` inherits, to be bound to `cls`."""
    configs = [base.__dict__.get("Config") for base in cls.__mro__[1:]]
    configs = [c for c in configs if isinstance(c, type) and issubclass(c, ConfigBase)]
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


_PLAIN = (ConfigBase, RequiredType, bool, int, float, str, tuple, list, dict, type(None))


def _prepare_fields(cls: type[ConfigBase[Any]]) -> None:
    """Turn mutable defaults into factories and refuse what would silently not be a field."""
    annotations = inspect.get_annotations(cls)
    for name in annotations:
        if hasattr(ConfigBase, name):
            path = f"{cls.__qualname__}.{name}"
            raise ConfigError(f"{path}: the name is taken by ConfigBase.{name}", path)
        default = cls.__dict__.get(name)
        if isinstance(default, (ConfigBase, tuple)) or type(default).__hash__ is None:
            factory = functools.partial(_clone, default)
            setattr(cls, name, dataclasses.field(default_factory=factory))
    for name, value in cls.__dict__.items():
        if name not in annotations and not name.startswith("_") and isinstance(value, _PLAIN):
            path = f"{cls.__qualname__}.{name}"
            raise ConfigError(f"{path} = {value!r} has no annotation: not a field", path)


def field_hint(cls: type[ConfigBase[Any]], name: str) -> Any:
    """The annotation of a field, resolved on first use: it may name a class defined further down.

    Raises:
        AnnotationError: a name in the annotation does not exist at run time.
    """
    if name not in cls._hints:
        annotation = cls.__dataclass_fields__[name].type  # pyright: ignore[reportAttributeAccessIssue]
        home = next(c for c in cls.__mro__ if name in c.__dict__.get("__annotations__", {}))
        owner = getattr(home, "_owner", None)
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
            cls._hints[name] = typing.get_type_hints(carrier, {**module, **names})[name]
        except NameError as error:
            path = f"{cls.__qualname__}.{name}"
            raise AnnotationError(
                f"{path}: its annotation {annotation!r} names {error.name!r}, "
                f"which {home.__module__} lacks at run time; import or define it at module level",
                path,
            ) from error
    return cls._hints[name]


def config_items(cfg: ConfigBase[Any]) -> Iterator[tuple[str, Any]]:
    """(field name, value) in the order of declaration."""
    for name in cfg.__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
        yield name, cfg.__dict__[name]


def owner_name(cfg: ConfigBase[Any]) -> str:
    """The name of what `cfg` builds, for messages: the class without its enclosing functions."""
    owner = type(cfg)._owner or type(cfg)
    return owner.__qualname__.rpartition("<locals>.")[2]


def join(path: str, parent: Any, key: Any) -> str:
    """The path of `parent`'s child: `a.b`, `a.0`, `a['x.y']` for a key that is no plain word."""
    is_word = isinstance(key, str) and key.replace("/", "_").isidentifier()
    if isinstance(parent, dict) and not is_word:
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else str(key)


def label(node: Any, path: str) -> Any:
    """Label every config of the tree with its path, so that its errors can name it; returns `node`."""
    if isinstance(node, ConfigBase):
        node.__dict__["_label"] = path
    for key, child in children(node):
        label(child, join(path, node, key))
    return node


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """(key, child) of a config, list, tuple or dict; nothing for any other value."""
    if isinstance(node, ConfigBase):
        yield from config_items(node)
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    elif isinstance(node, dict):
        yield from node.items()


def unknown_field(cls: type[ConfigBase[Any]], name: str, path: str | None = None) -> FieldError:
    """The error of a misspelt field, with the nearest names."""
    where, fields = path or cls.__qualname__, dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    hint = did_you_mean(name, [f.name for f in fields], limit=len(fields))
    return FieldError(f"{where} has no field {name!r}{hint}", f"{where}.{name}")


def _clone(value: Any) -> Any:
    if isinstance(value, ConfigBase):
        twin = object.__new__(type(value))
        twin.__dict__.update({name: _clone(v) for name, v in value.__dict__.items()})
        return twin
    if type(value) in (list, tuple):
        return type(value)(_clone(v) for v in value)
    if type(value) is dict:
        return {k: _clone(v) for k, v in value.items()}
    return copy.deepcopy(value)  # Functions and classes are their own copies.
