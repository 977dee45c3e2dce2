"""A config as text: what a run keeps, what golden tests compare and what a reviewer reads.

The first line names the class that the config builds. Then comes one line `path: value` for each
leaf, sorted by path, one for each nested config (`path: module:Owner`, or `path: module:function()`
for a call) and one for each container with configs in it (`path: tuple`). Strings are quoted;
functions are `module:name`, classes `class module:name`. Equal configs have equal text, so a dict's
order is not part of it: what is ordered should be a tuple. At the end, a comment `# code: /path/mine.py` names each
file of the user's own that objects come from.

    axlearn_like.decoder:Decoder
    block: axlearn_like.block:Block
    block.dim: REQUIRED
    block.norm: axlearn_like.norm:RMSNorm
    block.norm.eps: 1e-06
    dim: 64
"""

import ast
import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from axlearn_like.config.base import ConfigBase, is_config
from axlearn_like.config.consent import note_text
from axlearn_like.config.edit import is_literal, is_opened, split_path, walk_nodes
from axlearn_like.config.errors import ConfigError
from axlearn_like.config.fields import REQUIRED
from axlearn_like.config.mesh_rules import reach
from axlearn_like.config.names import config_from_name, config_name, import_name, is_class, object_name
from axlearn_like.config.tree import is_dict, is_sequence
from axlearn_like.config.trusted_code import file_of, offer

_CODE = "# code: "
_CONTAINERS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict}
_NAME = re.compile(r"(?P<cls>class )?(?P<name>[\w.]+:[\w.]+)(?P<call>\(\))?")
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "REQUIRED": REQUIRED}


def to_text(cfg: ConfigBase[Any]) -> str:
    """The text of a config, ending in a newline.

    Raises:
        ConfigError: a value has no text (a lambda, an array); names its path.
    """
    lines = text_lines(cfg)
    code = _code(lines.values())
    head = lines.pop("")
    return "\n".join([head, *(f"{path}: {text}" for path, text in lines.items()), *code]) + "\n"


def strip_comments(text: str) -> str:
    """The text without the lines that say where a user's files lie: what makes two configs one."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def text_lines(cfg: ConfigBase[Any]) -> dict[str, str]:
    """Path -> text of the value, sorted by path; the root is at ""."""
    lines = {path: _value_text(node, path) for path, node in walk_nodes(cfg)}
    return {path: lines[path] for path in sorted(lines, key=_order)}


def from_text(text: str) -> ConfigBase[Any]:
    """The config that `to_text` wrote; a field without a line takes its default.

    Nothing in the text is evaluated: values are literals. A name imports its module if that is trusted: those of this
    project, and code of the user's own that was named on a command line (see `axlearn_like.config.trusted_code`).
    What the config reaches outside of the run is refused when it is built, unless the user allows it (consent.py).

    Raises:
        ConfigError: a line cannot be read, or a field, value or name does not fit or is not trusted; names it.
    """
    for line in text.splitlines():
        if line.startswith(_CODE):
            offer(line.removeprefix(_CODE))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    head, *rows = lines or [""]
    root = _Node(head.strip())
    entries = [_split_row(row) for row in rows]
    for keys, value in sorted(entries, key=lambda entry: len(entry[0])):
        parent = root
        for depth, key in enumerate(keys[:-1]):
            if key not in parent.children:
                raise ConfigError(f"{_show(keys)}: no line for {_show(keys[: depth + 1])}", _show(keys))
            parent = parent.children[key]
        if keys[-1] in parent.children:
            raise ConfigError(f"{_show(keys)}: two lines for one path", _show(keys))
        parent.children[keys[-1]] = _Node(value)
    cfg = _read_config(root, "")
    note_text(reach(cfg))
    return cfg


def diff(a: ConfigBase[Any], b: ConfigBase[Any]) -> list[str]:
    """Readable lines of what differs: `  path: old -> new`, `- path: old`, `+ path: new`."""
    lines: list[str] = []
    for path, (old, new) in differences(text_lines(a), text_lines(b)).items():
        name = path or "(root)"
        if old is None or new is None:
            lines.append(f"+ {name}: {new}" if old is None else f"- {name}: {old}")
        else:
            lines.append(f"  {name}: {old} -> {new}")
    return lines


def differences(*sides: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Path -> text on each side, None where it has no such path, of what is not the same on all; sorted by path."""
    paths = sorted({path for side in sides for path in side}, key=_order)
    found = {path: [side.get(path) for side in sides] for path in paths}
    return {path: texts for path, texts in found.items() if len(set(texts)) > 1}


def recorded_lines(text: str) -> dict[str, str]:
    """Path -> text of the value, as `text_lines`, of a config's text; lines that are none are left out.

    Nothing is imported: for texts of strangers, and of classes that are gone.
    """
    head, *rows = strip_comments(text).splitlines() or [""]
    found = {"": head}
    for row in rows:
        with contextlib.suppress(ConfigError, MemoryError, RecursionError):  # the last two of deep nesting
            _, value = _split_row(row)
            found[row[: -len(value) - 2]] = value
    return found


def recorded_values(text: str) -> dict[str, Any]:
    """Path -> value of the plain values (numbers, texts, containers) of a config's text; see `recorded_lines`."""
    values: dict[str, Any] = {}
    for path, value in recorded_lines(text).items():
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            values[path] = ast.literal_eval(value)
    return values


def _code(values: Iterable[str]) -> list[str]:
    """The comments that name the user's files."""
    names = (_NAME.fullmatch(value) for value in values)
    files = {file_of(found["name"].partition(":")[0]) for found in names if found}
    return [f"{_CODE}{path}" for path in sorted(filter(None, files))]


def _order(path: str) -> tuple[list[tuple[int, int, str]], str]:
    """Indices in the order of numbers, everything else in that of letters."""
    keys = split_path(path) if path else ()
    parts = [(0, int(k), "") if str(k).isdecimal() else (1, 0, str(k)) for k in keys]
    return parts, path  # The path decides between the dict keys 3 and "3".


def _value_text(value: Any, path: str) -> str:
    if is_config(value):
        return config_name(value, path or "the root")
    if is_opened(value):
        return type(value).__name__
    if is_literal(value):
        return repr(_sorted_dicts(value))
    if value is REQUIRED or type(value) is float:
        return repr(value)
    if isinstance(value, type):
        return f"class {object_name(value, path)}"
    return object_name(value, path)


def _sorted_dicts(value: Any) -> Any:
    if is_dict(value):
        return {k: _sorted_dicts(value[k]) for k in sorted(value, key=repr)}
    if is_sequence(value):
        return type(value)(map(_sorted_dicts, value))
    return value


class _Node:
    """A line of the text with the lines below it."""

    def __init__(self, text: str):
        self.text = text
        self.children: dict[Any, _Node] = {}


def _split_row(row: str) -> tuple[tuple[Any, ...], str]:
    """A quoted key may hold ": ", so the path ends at the first one that has a path before it."""
    at = row.find(": ")
    while at >= 0:
        try:
            return split_path(row[:at]), row[at + 2 :]
        except ConfigError:
            at = row.find(": ", at + 1)
    raise ConfigError(f"not a line `path: value`: {row!r}")


def _read_config(node: _Node, path: str) -> ConfigBase[Any]:
    where = path or "the root"
    cls = config_from_name(node.text, where)
    prefix = f"{path}." if path else ""
    values = {key: _read(child, f"{prefix}{key}") for key, child in node.children.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", path) from error


def _read(node: _Node, path: str) -> Any:
    container = _CONTAINERS.get(node.text)
    if container is dict:
        return {key: _read(child, f"{path}[{key!r}]") for key, child in node.children.items()}
    if container is not None:
        indices = [str(i) for i in range(len(node.children))]
        if set(indices) != node.children.keys():
            raise ConfigError(f"{path}: the elements are numbered {', '.join(node.children)}", path)
        return container(_read(node.children[i], f"{path}.{i}") for i in indices)
    if node.text in _WORDS:
        return _WORDS[node.text]
    found = _NAME.fullmatch(node.text)
    if found and not found["cls"] and (found["call"] or is_class(found["name"], path)):
        return _read_config(node, path)
    if node.children:
        raise ConfigError(f"{path}: {node.text!r} is a value, but there are lines below it", path)
    if found:
        return import_name(found["name"], path)
    try:
        return ast.literal_eval(node.text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: cannot read the value {node.text!r}", path) from error


def _show(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))
