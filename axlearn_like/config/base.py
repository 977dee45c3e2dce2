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

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, TypeGuard, dataclass_transform

from axlearn_like.config.checks import check
from axlearn_like.config.consent import check_consent
from axlearn_like.config.errors import AnnotationError, ConfigError, FieldError, marking
from axlearn_like.config.fields import REQUIRED, field_hint, note_renamed, prepare_fields, unknown_field
from axlearn_like.config.tree import Node, clone, config_html, config_items, label, label_of, nearest_configs, path_of
from mesh.errors import UserError
from mesh.files.bucket import bucket_url

# While set, `build` reports (path, the owner's private config) of everything it has built.
on_built: ContextVar[Callable[[str, "ConfigBase[Any]"], None] | None] = ContextVar("on_built", default=None)


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class ConfigBase[T](Node):
    """Base of every `Config`; `T` is the class that `build` makes."""

    def __init_subclass__(cls, *, renamed: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        """Make the class a dataclass. `renamed`: field of an earlier release -> its name now, for the error."""
        super().__init_subclass__(**kwargs)
        cls.__owner__ = None
        prepare_fields(cls, ConfigBase)
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        note_renamed(cls, renamed or {})

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
                return computed.fget(self)  # Failed inside: shows its own error.
            raise self._unknown_field(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
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

    def _repr_html_(self) -> str:
        return config_html(self)

    def set(self, **values: Any) -> Self:
        """Set fields in place; either all of them or, on an error, none."""
        for name in values:
            if name not in self.__dataclass_fields__:
                raise self._unknown_field(name)
        self.__dict__.update({name: self._checked(name, value) for name, value in values.items()})
        return self

    def clone(self, **values: Any) -> Self:
        """A deep copy with `values` set. A config that stood in two places becomes two."""
        return clone(self).set(**values)

    def build(self, **runtime: Any) -> T:
        """Make the owner from a private copy of this config: `owner(cfg, **runtime)`.

        Raises:
            ConfigError: names every REQUIRED field of this config that is not set, with its path; or what a text's
                config reaches without the user's consent (`reaches`).
        """
        cfg = clone(self)
        if cfg.__owner__ is None:
            name = type(cfg).__qualname__
            raise ConfigError(f"{name} belongs to no class: nothing to build", name)
        path = path_of(cfg)
        label(cfg, path)
        cfg._check_ready(path, runtime)
        check_consent(cfg.all_reaches(), path)
        with marking(path):
            cfg.check_fields()
            built = cfg._make(runtime)
        report = on_built.get()
        if report is not None:
            report(path, cfg)
        return built

    def check(self) -> None:
        """Refuse what cannot work in this config and those within, before anything expensive is begun.

        A program calls it once, at the root. It goes from the top down: the rules of the own fields (`check_fields`),
        then `check` of the configs within, but for those of which a parent has yet to set fields. An override adds
        what needs more than the fields: what parents set (`filled_from`), a mesh, tokens.

        Raises:
            UserError: names the field by its path, what was expected, and what it is.
        """
        path = path_of(self)
        label(self, path)
        self._check_ready(path, {})
        self.check_fields()
        for child in nearest_configs(self):
            if is_config(child) and all(value is not REQUIRED for _, value in config_items(child)):
                child.check()

    def check_fields(self) -> None:
        """Refuse, by `require`, values that the owner cannot have; `build` calls it too, when all fields are set."""

    def check_set(self) -> None:
        """Refuse fields that are REQUIRED and not set (ConfigError names each by its path)."""
        self._check_ready(path_of(self), {})

    def reaches(self) -> tuple[str, ...]:
        """Return what the owner reaches outside of the run (consent.py says in which words); nothing is the default.

        A config that came from a text is built only if the user has allowed each of these.
        """
        return ()

    def all_reaches(self) -> tuple[str, ...]:
        """Return what `reaches` says, and the buckets that the fields name."""
        texts: list[Any] = []
        for _, value in config_items(self):
            texts += value if isinstance(value, tuple) else (value,)
        urls = [text for text in texts if isinstance(text, str) and bucket_url(text)]
        return (*self.reaches(), *(url for url in urls if not url.startswith(("http://", "https://"))))

    def require(self, field: str, fits: bool, expected: str) -> None:
        """Raise a ConfigError that names `field`, what was expected, and its value, unless it `fits`."""
        if not fits:
            path = f"{path_of(self)}.{field}"
            raise ConfigError(f"{path}: expected {expected}, got {getattr(self, field)!r}", path)

    @contextlib.contextmanager
    def errors_in(self, field: str) -> Generator[None]:
        """A UserError of what is checked inside becomes a ConfigError that names `field`."""
        try:
            yield
        except UserError as error:
            path = f"{path_of(self)}.{field}"
            raise ConfigError(f"{path}: {error}", path) from error

    def require_least(self, least: float, *fields: str) -> None:
        """`require` each of these fields to be `least` or more, if it is not None."""
        for field in fields:
            value = getattr(self, field)
            self.require(field, value is None or value >= least, f"{least} or more")

    def filled_from(self, parent: "ConfigBase[Any]", **values: Any) -> Self:
        """A copy with `values` set, and each field that is declared REQUIRED from the parent's field of its name."""
        known = dict(config_items(parent))
        wanted = [f.name for f in dataclasses.fields(self) if f.default is REQUIRED and f.name in known]
        return self.clone(**{name: known[name] for name in wanted if name not in values}, **values)

    def _make(self, runtime: dict[str, Any]) -> Any:
        return type(self).__owner__(self, **runtime)

    def _check_ready(self, path: str, runtime: Mapping[str, Any]) -> None:
        missing: list[str] = []
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
        return False  # A class reads its fields from its config alone.

    def _checked(self, name: str, value: Any) -> Any:
        if value is REQUIRED:
            return value
        where = label_of(self) or type(self).__qualname__
        return check(value, field_hint(type(self), name), f"{where}.{name}")

    def _set_default(self, name: str, value: Any) -> None:
        try:
            value = self._checked(name, value)
        except AnnotationError:
            pass  # The annotation names a class further down the module: `build` checks it.
        self.__dict__[name] = value

    def _unknown_field(self, name: str) -> FieldError:
        return unknown_field(type(self), name, label_of(self))

    @classmethod
    def _matches_alias(cls, value: Any, args: tuple[Any, ...]) -> bool:
        """Return True if `value` fits the annotation `ConfigBase[X]`: a config of a class that is an X."""
        wanted = args[0]
        if not isinstance(value, cls):
            return False
        owner: Any = value.__owner__
        if wanted is Any or not (isinstance(wanted, type) and isinstance(owner, type)):
            return True
        return issubclass(owner, wanted)


def is_config(value: Any) -> TypeGuard[ConfigBase[Any]]:
    """Return True for a config."""
    return isinstance(value, ConfigBase)


def is_config_class(value: Any) -> TypeGuard[type[ConfigBase[Any]]]:
    """Return True for the class of a config."""
    return isinstance(value, type) and issubclass(value, ConfigBase)


class Configurable:
    """Base of classes made by their nested `Config`: `__init__(self, cfg, **runtime)`.

    >>> from axlearn_like.config import REQUIRED, ConfigBase, Configurable
    >>> class Scale(Configurable):
    ...     class Config(ConfigBase["Scale"]):
    ...         factor: float = REQUIRED
    ...         offset: float = 0.0
    ...     def __init__(self, cfg: Config):
    ...         self.cfg = cfg
    >>> Scale.Config(factor=2.0).build().cfg.factor
    2.0
    >>> Scale.Config().set(facter=2.0)
    Traceback (most recent call last):
    axlearn_like.config.errors.FieldError: Scale.Config has no field 'facter'; did you mean 'factor'?...
    """

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
