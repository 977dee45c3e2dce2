"""A config as a tree: the children of a node, their paths, deep copies, and markup that opens and closes."""

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from html import escape
from typing import Any, ClassVar, TypeGuard, cast


class Node:
    """A config as this module sees it: named fields, and a label that says where in a tree it stands."""

    # The class that it builds, or the function that it calls.
    __owner__: ClassVar[Any] = None
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __renamed__: ClassVar[dict[str, str]] = {}  # earlier name of a field -> its name now


def config_items(cfg: Node) -> Iterator[tuple[str, Any]]:
    """(field name, value) in the order of declaration."""
    for name in cfg.__dataclass_fields__:
        yield name, cfg.__dict__[name]


def owner_name(cfg: Node) -> str:
    """The name of what `cfg` builds, for messages: the class without its enclosing functions."""
    owner = type(cfg).__owner__ or type(cfg)
    return owner.__qualname__.rpartition("<locals>.")[2]


def label_of(cfg: Node) -> str | None:
    """The path of `cfg` from the root of its tree, if that was labelled."""
    return cfg.__dict__.get("_label")


def path_of(cfg: Node) -> str:
    """The label of `cfg`, or else the name of what it builds: its name in messages."""
    return label_of(cfg) or owner_name(cfg)


def label(node: Any, path: str) -> Any:
    """Label every config of the tree with its path, so that its errors can name it; returns `node`."""
    if isinstance(node, Node):
        node.__dict__["_label"] = path
    for key, child in children(node):
        label(child, join(path, node, key))
    return node


def join(path: str, parent: Any, key: Any) -> str:
    """The path of `parent`'s child: `a.b`, `a.0`, `a['x.y']` for a key that is no plain word."""
    is_word = isinstance(key, str) and key.replace("/", "_").isidentifier()
    if isinstance(parent, dict) and not is_word:
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else str(key)


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """(key, child) of a config, list, tuple or dict; nothing for any other value."""
    if isinstance(node, Node):
        yield from config_items(node)
    elif is_sequence(node):
        yield from enumerate(node)
    elif is_dict(node):
        yield from node.items()


def nearest_configs(node: Any) -> Iterator[Node]:
    """The configs below a node without another config between."""
    for _, child in children(node):
        if isinstance(child, Node):
            yield child
        else:
            yield from nearest_configs(child)


def config_key(value: Any) -> Hashable:
    """A key of a config's values: equal for equal configs alone, and left as it is when the config is edited.

    Numbers of different types differ (1, 1.0 and True do where a config is traced), functions and classes are those
    themselves. A value that cannot be hashed makes a key that cannot.
    """
    kind: Hashable = value.__class__
    if isinstance(value, Node):
        return (kind, tuple(config_key(child) for _, child in children(value)))
    if is_sequence(value):
        return (kind, tuple(config_key(child) for child in value))
    if is_dict(value):
        return (kind, tuple((key, config_key(child)) for key, child in value.items()))
    return (kind, repr(value) if kind is float else value)


def clone(value: Any) -> Any:
    """A deep copy. A config that stands in two places becomes two; labels stay."""
    if isinstance(value, Node):
        twin = object.__new__(type(value))
        twin.__dict__.update({name: clone(v) for name, v in value.__dict__.items()})
        return twin
    if type(value) in (list, tuple):
        return type(value)(clone(v) for v in value)
    if is_dict(value) and type(value) is dict:
        return {k: clone(v) for k, v in value.items()}
    return copy.deepcopy(value)  # Functions and classes are their own copies.


def is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return True for a list or a tuple."""
    return isinstance(value, (list, tuple))


def is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Return True for a dict."""
    return isinstance(value, dict)


def config_html(cfg: Node, name: str = "") -> str:
    """Return a config as markup for notebooks; `name`: of the field that holds it."""
    rows: list[str] = []
    for field, value in config_items(cfg):
        inner = cast(Sequence[object], value) if isinstance(value, tuple | list) else ()
        several: dict[str, object] = {field: value}
        if any(isinstance(one, Node) for one in inner):
            several = {f"{field}[{index}]": one for index, one in enumerate(inner)}
        for path, one in several.items():
            if isinstance(one, Node):
                rows.append(config_html(one, path))
            else:
                rows.append(f"<div><code>{escape(path)} = {escape(repr(one))}</code></div>")
    title = f"{escape(name)}: " if name else ""
    opened = "" if name else " open"
    kind = escape(type(cfg).__qualname__.removesuffix(".Config"))
    body = f'<div style="margin-left:1.5em">{"".join(rows)}</div>'
    return f"<details{opened}><summary><code>{title}<b>{kind}</b></code></summary>{body}</details>"
