"""Names of top-level objects and of configs: how a config's text points at code, and the way back.

`module:qualname` is a function and `class module:qualname` a class. As the name of a config,
`module:Owner` is `Owner.Config` and `module:function()` the config of a call of that function.
"""

import importlib
import itertools
import sys
from typing import Any

from axlearn_like.config.base import ConfigBase
from axlearn_like.config.function import FunctionConfig, config_class


def config_name(cfg: ConfigBase[Any], where: str = "config") -> str:
    """`module:Owner`, `module:function()`, or `module:Name` of a config that builds nothing."""
    cls = type(cfg)
    if isinstance(cfg, FunctionConfig):
        return f"{qualified_name(cls._owner, where)}()"
    return qualified_name(cls._owner or cls, where)


def config_from_name(name: str, where: str = "config") -> type[ConfigBase[Any]]:
    """The config class that `config_name` wrote the name of.

    Raises:
        LookupError: when there is no such object.
        TypeError: when it has no `Config`.
    """
    if name.endswith("()"):
        return config_class(import_name(name.removesuffix("()"), where))
    found = import_name(name, where)
    for config in (found, getattr(found, "Config", None)):
        if isinstance(config, type) and issubclass(config, ConfigBase):
            return config
    raise TypeError(f"{where}: {name} has no Config; a call of a function is written {name}()")


def qualified_name(obj: Any, where: str = "value") -> str:
    """`module:qualname` of a top-level function or class, its package's public name if it has one.

    Raises:
        TypeError: for a lambda, a local function or whatever else its name does not lead back to.
    """
    name, module = getattr(obj, "__qualname__", None), getattr(obj, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        hint = "; describe a partial call with config_for(function, ...)" if callable(obj) else ""
        raise TypeError(f"{where}: {obj!r} ({type(obj).__qualname__}) cannot be written as text{hint}")
    if "<lambda>" in name:
        raise TypeError(f"{where}: a lambda has no name to write; define a top-level function instead")
    if "<locals>" in name:
        raise TypeError(f"{where}: {name} is local to a function; define it at the top of its module")
    # optax._src.alias:adamw is optax:adamw to its users, and stays so when optax moves its files.
    for candidate in itertools.accumulate(module.split("."), "{}.{}".format):
        if _follow(sys.modules.get(candidate), name) is obj:
            return f"{candidate}:{name}"
    raise TypeError(f"{where}: {module}:{name} is not {obj!r}; only top-level objects can be written as text")


def import_name(name: str, where: str = "value") -> Any:
    """The object at `module:qualname`; imports that module and nothing else.

    Raises:
        LookupError: when the module or the name in it does not exist.
    """
    module_name, _, qualname = name.partition(":")
    if not all(part.isidentifier() for part in f"{module_name}.{qualname}".split(".")):
        raise LookupError(f"{where}: expected module:name, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LookupError(f"{where}: no module {error.name!r} (in {name!r})") from error
    found = _follow(module, qualname)
    if found is None:
        raise LookupError(f"{where}: module {module_name!r} has no {qualname!r}")
    return found


def _follow(start: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        start = getattr(start, part, None)
    return start
