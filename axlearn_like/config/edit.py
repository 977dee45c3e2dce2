"""Typed edits of any config tree: by path, by class, by mesh rule.

A path names a place from the root: `trainer.learner.lr`, `layers.0.dim`, `envs['a.b'].weight` (a
dict key that is no plain word stands in brackets). Every edit works in place and refuses to do
nothing: a path that does not exist and a class that is nowhere in the tree are errors, so that a
stale edit cannot pass unnoticed.
"""

import ast
import contextlib
import fnmatch
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from axlearn_like.config.base import ConfigBase, is_config
from axlearn_like.config.checks import check
from axlearn_like.config.errors import ConfigError, marked_path
from axlearn_like.config.fields import field_hint, unknown_field
from axlearn_like.config.parse import element_hint, parse_value
from axlearn_like.config.tree import children, is_dict, is_sequence, join, path_of
from mesh.errors import UserError, did_you_mean

Edit = Callable[[Any], Any] | tuple[str, Any]
MeshRules = Sequence[tuple[str, Sequence[Edit]]]

_SEGMENT = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^]'"]+)\]|([^.\[\]\s:]+)""")


def walk(cfg: ConfigBase[Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf; a list, tuple or dict of plain values is one leaf."""
    return ((path, node) for path, node in walk_nodes(cfg) if not is_opened(node))


def walk_configs(cfg: ConfigBase[Any]) -> Iterator[tuple[str, ConfigBase[Any]]]:
    """(path, config) of every config in the tree; the root comes first, at path ""."""
    return ((path, node) for path, node in walk_nodes(cfg) if is_config(node))


def walk_nodes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every config, opened container and leaf; parents before their children."""
    yield path, node
    if is_opened(node):
        for key, child in children(node):
            yield from walk_nodes(child, join(path, node, key))


def is_opened(node: Any) -> bool:
    """Return True if the node's children have paths of their own."""
    if is_config(node):
        return True
    return type(node) in (list, tuple, dict) and not is_literal(node)


def is_literal(value: Any) -> bool:
    """Return True if `repr` of the value is a Python literal that parses back to it."""
    if type(value) is float:
        return value - value == 0.0  # inf and nan have no literal
    if is_dict(value) and type(value) is dict:
        return all(is_literal(k) and is_literal(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(is_literal(v) for v in value)
    return value is None or type(value) in (bool, int, str, bytes)


def split_path(path: str) -> tuple[Any, ...]:
    """The keys of a path: fields, indices and bare dict keys as str, bracketed keys as they are."""
    keys: list[Any] = []
    at = 0
    while at < len(path):
        if path[at] == "." and keys:
            at += 1
        found = _SEGMENT.match(path, at)
        if found is None or (keys and found[2] and path[at - 1] != "."):
            break
        try:
            keys.append(found[2] or ast.literal_eval(found[1]))
        except (ValueError, SyntaxError):
            break
        at = found.end()
    if at < len(path) or not keys or path.endswith("."):
        raise ConfigError(f"{path!r} is not a path like 'trainer.learner.lr' or 'layers.0.dim'", path)
    return tuple(keys)


def get_path(cfg: ConfigBase[Any], path: str) -> Any:
    """The value at a path (ConfigError: a field, an index or a key does not exist; gives the nearest names)."""
    node, where = cfg, path_of(cfg)
    for key in split_path(path):
        key = _key(node, key, where)
        node, where = dict(children(node))[key], join(where, node, key)
    return node


def set_path[C: ConfigBase[Any]](cfg: C, path: str, value: Any) -> C:
    """Set the value at a path in place; a string is parsed as the field's annotation asks.

    Raises:
        ConfigError: the path does not exist (gives the nearest names), or the value does not fit (names the full
            path and the annotation).
    """
    _put(cfg, split_path(path), value, None, path_of(cfg))
    return cfg


def replace[C: ConfigBase[Any]](
    root: ConfigBase[Any],
    match: type[C],
    fn: Callable[[C], ConfigBase[Any]],
    glob: str = "*",
) -> int:
    """Replace by `fn(config)` every config of class `match`; returns how many.

    Only those at a path like `glob`, in which `*` also matches dots. Subclasses of `match` count.
    The deepest are replaced first; the root itself never is. `fn` may edit and return its argument;
    a config that stands in several places is given to it once.

    Raises:
        ConfigError: nothing matches, or `fn` returns no config or one that does not fit the field.
    """
    places = [(p, c) for p, c in walk_configs(root) if p and isinstance(c, match)]
    found = [(p, c) for p, c in places if fnmatch.fnmatchcase(p, glob)]
    if not found:
        where = f"; it is at: {', '.join(p for p, _ in places)}" if places else ""
        name = path_of(root)
        wanted = "" if glob == "*" else f" at a path like {glob!r}"
        raise ConfigError(f"{name} has no {match.__qualname__}{wanted}{where}", name)
    made: dict[int, ConfigBase[Any]] = {}
    seen: list[ConfigBase[Any]] = []
    for path, old in reversed(found):
        new = made[id(old)] if id(old) in made else fn(old)
        if not is_config(new):
            where = f"{path_of(root)}.{path}"
            raise ConfigError(f"{where}: the edit returned {new!r}, not a config", where)
        made[id(old)] = new
        shared = any(new is other for other in seen)
        seen.append(new)
        if get_path(root, path) is not new:  # else its parent stands in several places, too
            set_path(root, path, new.clone() if shared else new)
    return len(found)


def apply_mesh_rules[C: ConfigBase[Any]](cfg: C, rules: MeshRules, device: str) -> C:
    """Apply the edits of the first rule whose pattern matches the whole of `device`, in place.

    An edit is a function of the config (its result is not used) or a pair (path, value).

    Raises:
        ConfigError: no rule matches; names them all.
    """
    for pattern, edits in rules:
        if re.fullmatch(pattern, device):
            for edit in edits:
                if callable(edit):
                    edit(cfg)
                else:
                    set_path(cfg, *edit)
            return cfg
    patterns = ", ".join(repr(pattern) for pattern, _ in rules) or "none"
    name = path_of(cfg)
    raise ConfigError(f"{name} has no mesh rule for {device!r}; its rules: {patterns}", name)


@contextlib.contextmanager
def errors_at(field: str, cfg: ConfigBase[Any]) -> Generator[None]:
    """A UserError of what is built inside becomes a ConfigError at its path, in which `cfg` is called `field`."""
    try:
        yield
    except UserError as error:
        found = (isinstance(error, ConfigError) and error.path) or marked_path(error) or ""
        if not found.startswith(path_of(cfg)):
            raise
        path = field + found.removeprefix(path_of(cfg))
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{found}: ')}", path) from error


def _put(node: Any, keys: tuple[Any, ...], value: Any, hint: Any, where: str) -> Any:
    """The node with the value set below it: configs change in place, containers are copied."""
    if not keys:
        if isinstance(value, str):
            return parse_value(value, hint, where)
        return check(value, hint, where)
    key = _key(node, keys[0], where)
    if is_config(node):
        hint = field_hint(type(node), key)
        new = _put(getattr(node, key), keys[1:], value, hint, join(where, node, key))
        setattr(node, key, new)
        return node
    hint = element_hint(hint, key)
    entries = dict(children(node))
    entries[key] = _put(entries[key], keys[1:], value, hint, join(where, node, key))
    return entries if is_dict(node) else type(node)(entries.values())


def _key(node: Any, key: Any, where: str) -> Any:
    """The key as the node knows it, or the error that says what there is instead."""
    if is_config(node):
        if key not in dict(children(node)):
            raise unknown_field(type(node), str(key), where)
        return key
    if is_dict(node):
        if key not in node:
            hint = did_you_mean(str(key), list(map(str, node)))
            raise ConfigError(f"{where} has no key {key!r}{hint}", where)
        return key
    if is_sequence(node):
        if not str(key).isdecimal() or int(key) >= len(node):
            raise ConfigError(f"{where} has {len(node)} elements, none at {key!r}", where)
        return int(key)
    raise ConfigError(f"{where} is {node!r} ({type(node).__qualname__}), which has no {key!r}", where)
