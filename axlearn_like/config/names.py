"""Names of top-level objects and of configs: how a config's text points at code, and the way back.

`module:qualname` is a function and `class module:qualname` a class. As the name of a config,
`module:Owner` is `Owner.Config` and `module:function()` the config of a call of that function.
"""

import importlib
import itertools
import sys
from types import ModuleType
from typing import Any

from axlearn_like.config.base import ConfigBase, is_config_class
from axlearn_like.config.errors import ConfigError, ImportNameError
from axlearn_like.config.function import FunctionConfig, config_class
from axlearn_like.config.trusted_code import check_module, check_object
from mesh.errors import did_you_mean, nearest


def config_name(cfg: ConfigBase[Any], where: str = "config") -> str:
    """`module:Owner`, `module:function()`, or `module:Name` of a config that builds nothing."""
    cls = type(cfg)
    if isinstance(cfg, FunctionConfig):
        return f"{object_name(cls.__owner__, where)}()"
    return qualified_name(cls.__owner__ or cls, where)


def config_from_name(name: str, where: str = "config") -> type[ConfigBase[Any]]:
    """The config class that `config_name` wrote the name of.

    Raises:
        ImportNameError: there is no such object, a text may not name it, or it has no `Config`.
    """
    if name.endswith("()"):
        return config_class(import_name(name.removesuffix("()"), where))
    found = _import(name, where)
    for config in (found, getattr(found, "Config", None)):
        if is_config_class(config):
            check_module(f"{config.__module__}:{config.__qualname__}", where)
            return config
    raise ImportNameError(f"{where}: {name} has no Config; a call of a function is written {name}()", where)


def object_name(obj: Any, where: str = "value") -> str:
    """`module:qualname` of a function or class that is a value in a config.

    Raises:
        ConfigError: it has no name to write, or one that no text may name: the run could not be read again.
    """
    name = qualified_name(obj, where)
    check_object(obj, name, where, written=True)
    return name


def qualified_name(obj: Any, where: str = "value") -> str:
    """`module:qualname` of a top-level function or class, its package's public name if it has one.

    Raises:
        ConfigError: a lambda, a local function, or another object that its name does not lead back to.
    """
    name, module = getattr(obj, "__qualname__", None), getattr(obj, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        hint = "; describe a partial call with config_for(function, ...)" if callable(obj) else ""
        raise ConfigError(f"{where}: {obj!r} ({type(obj).__qualname__}) cannot be written as text{hint}", where)
    if "<lambda>" in name:
        raise ConfigError(f"{where}: a lambda has no name to write; define a top-level function instead", where)
    if "<locals>" in name:
        raise ConfigError(f"{where}: {name} is local to a function; define it at the top of its module", where)
    # optax._src.alias:adamw is optax:adamw to its users, and stays so when optax moves its files.
    for candidate in itertools.accumulate(module.split("."), "{}.{}".format):
        if _follow(sys.modules.get(candidate), name) is obj:
            return f"{candidate}:{name}"
    raise ConfigError(f"{where}: {module}:{name} is not {obj!r}; only top-level objects can be written as text", where)


def import_name(name: str, where: str = "value") -> Any:
    """The function or type at `module:qualname`; imports that module and nothing else, and only if it is trusted.

    Raises:
        ImportNameError: the module or the name in it does not exist, or a config's text may not name it.
    """
    found = _import(name, where)
    check_object(found, name, where)
    return found


def is_class(name: str, where: str) -> bool:
    """Return True if `module:qualname` is a class: in a text, one without the word `class` is that of a config.

    Raises:
        ImportNameError: as `import_name` does.
    """
    return isinstance(_import(name, where), type)


def _import(name: str, where: str) -> Any:
    module_name, _, qualname = name.partition(":")
    if not all(part.isidentifier() for part in f"{module_name}.{qualname}".split(".")):
        raise ImportNameError(f"{where}: expected module:name, got {name!r}", where)
    check_module(name, where)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportNameError(f"{where}: no module {error.name!r} (in {name!r})", where) from error
    found = _follow(module, qualname)
    if found is None:
        near = did_you_mean(qualname, nearest(qualname, [known for known in vars(module) if known[0] != "_"]))
        raise ImportNameError(f"{where}: module {module_name!r} has no {qualname!r}{near}", where)
    return found


def _follow(start: Any, qualname: str) -> Any:
    """The class or function, by way of classes; None where there is none. Modules within a module do not count."""
    for part in qualname.split("."):
        start = getattr(start, part, None)
        if isinstance(start, ModuleType):
            return None
    return start
