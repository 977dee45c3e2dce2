"""A config as the Python function that returns it: what differs from defaults, with named parts and comments."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.pretrained import Pretrained
from axlearn_like.config import ConfigBase, config_items, config_key, config_name, strip_comments, to_text
from axlearn_like.config.function import FunctionConfig
from axlearn_like.config.names import object_name
from axlearn_like.config.tree import join
from axlearn_like.config.trusted_code import file_of
from experiments.start.base import hf_int8_lora, hf_lora
from experiments.start.plan import Start
from mesh.errors import UserError
from mesh.files.written import replace_file
from models.huggingface import hf

_WIDTH = 110
_PARTS = ("policy", "model", "tokenizer", "tasks", "scorer")  # fields that stand in several places, or are long


def save_experiment(found: Start, cfg: ConfigBase[Any], place: str) -> None:
    """Write a started experiment as a function of a file, with the name of the file.

    Args:
        found: what was derived.
        cfg: its config, as it is run.
        place: name of the file, such as mine.py.

    Raises:
        UserError: it is no name of a module, or there is such a file of another experiment.
    """
    path = Path(place).expanduser()
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"--save-experiment {place}: expected a name such as mine.py, of a function that it will have")
    text = python_source(cfg, path.stem, found.about, {what: why for what, _, why in found.plan.entries})
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"--save-experiment {place}: the file exists, with another experiment; expected another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def python_source(cfg: ConfigBase[Any], name: str, about: str, comments: Mapping[str, str]) -> str:
    """Return the text of a module with a function of this name, whose config has the same text.

    Args:
        cfg: any config.
        name: name of the function.
        about: a sentence for its docstring.
        comments: path of a field -> comment behind it.

    Raises:
        UserError: the config cannot be written so.
    """
    writer = _Writer(comments)
    parts: dict[str, ConfigBase[Any]] = {}
    for field in _PARTS:
        owner = getattr(cfg, "verifier", None) if field == "scorer" else cfg
        if isinstance(value := getattr(owner, field, None), ConfigBase):
            parts[field] = value
    lines = []
    for field, value in parts.items():
        lines.append(f"    {field} = {writer.config(value, field, 4)}")
        writer.named[config_key(value)] = field
    result = writer.config(cfg, "", 4)
    kind = result.partition("(")[0]
    imports = "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in writer.imported())
    body, about = "\n".join(lines), _said(about)
    text = (
        f'"""{about}."""\n\n{imports}\n\n\ndef {name}() -> {kind}:\n    """{about}."""\n{body}\n    return {result}\n'
    )
    scope: dict[str, Any] = {}
    exec(compile(text, f"{name}.py", "exec"), scope)  # proof that the text says the same
    if strip_comments(to_text(scope[name]())) != strip_comments(to_text(cfg)):
        raise UserError(f"--save-experiment: the function {name} would not say the same; axl config show has the text")
    return text


class _Writer:
    """A writer of values as Python expressions, which collects their imports."""

    def __init__(self, comments: Mapping[str, str]):
        self.named: dict[Any, str] = {}  # key of a config -> variable that holds it
        self._imports: dict[str, set[str]] = {}
        self._comments = comments

    def imported(self) -> list[tuple[str, set[str]]]:
        """Return names by module, in the order of modules."""
        return sorted(self._imports.items())

    def config(self, cfg: ConfigBase[Any], path: str, indent: int) -> str:
        """Return the expression of a config at a path, whose lines are indented so far."""
        if (known := self.named.get(config_key(cfg))) is not None:
            return known
        if isinstance(cfg, Pretrained.Config) and (short := self._pretrained(cfg)) is not None:
            return short
        defaults = {field.name: _default(field) for field in dataclasses.fields(cfg)}
        fields = {key: value for key, value in config_items(cfg) if config_key(value) != config_key(defaults[key])}
        if isinstance(cfg, FunctionConfig):
            self._import("axlearn_like.config:config_for")
            function = self._object(type(cfg).__owner__)
            return self._call("config_for", fields, path, indent, first=function)
        owner = self._import(config_name(cfg))
        return self._call(f"{owner}.Config" if type(cfg).__owner__ else owner, fields, path, indent)

    def _value(self, value: Any, path: str, indent: int) -> str:
        if isinstance(value, ConfigBase):
            return self.config(value, path, indent)
        if isinstance(value, tuple | list):
            items = [self._value(one, join(path, value, at), indent + 4) for at, one in enumerate(value)]
            opened, closed = "()" if isinstance(value, tuple) else "[]"
            comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
            return _joined(opened, items, closed, indent, comma)
        if isinstance(value, dict):
            items = [
                f"{_literal(key)}: {self._value(one, join(path, value, key), indent + 4)}" for key, one in value.items()
            ]
            return _joined("{", items, "}", indent)
        return self._object(value) if callable(value) else _literal(value)

    def _call(self, name: str, fields: Mapping[str, Any], path: str, indent: int, first: str = "") -> str:
        items, noted = [first] if first else [], dict[int, str]()
        for key, value in fields.items():
            place = f"{path}.{key}" if path else key
            items.append(f"{key}={self._value(value, place, indent + 4)}")
            if comment := self._comments.get(place):
                noted[len(items) - 1] = f"  # {_said(comment)}"
        return _joined(f"{name}(", items, ")", indent, noted=noted)

    def _pretrained(self, cfg: Pretrained.Config) -> str | None:
        """Return the call that reads a model's directory and makes this config; None: it does not."""
        path = getattr(cfg.start_from, "path", "")
        for make in (hf, hf_lora, hf_int8_lora):
            plain = make(path)
            fields = {k: v for k, v in config_items(cfg) if config_key(v) != config_key(getattr(plain, k))}
            if not any(isinstance(value, ConfigBase) for value in fields.values()):
                self._imports.setdefault(make.__module__.removesuffix(".policy"), set()).add(make.__name__)
                return self._call(make.__name__, fields, "policy", 4, first=_literal(path))
        return None

    def _object(self, found: Any) -> str:
        """Return a function or class: of a file of the user's by its place, else imported."""
        name = object_name(found)
        if (file := file_of(name.partition(":")[0])) is not None:
            self._import("experiments.registry:find")
            return f"find({_literal(f'{file}:' + name.partition(':')[2])})"
        return self._import(name)

    def _import(self, name: str) -> str:
        module, _, qualname = name.partition(":")
        self._imports.setdefault(module, set()).add(qualname.partition(".")[0])
        return qualname


def _said(text: str) -> str:
    """Return a text that ends no docstring and no comment: names of files in it may be a stranger's."""
    return "".join(letter if letter.isprintable() and letter not in '"\\' else "_" for letter in text)


def _literal(value: Any) -> str:
    """Return a literal, texts in the quotes that formatters prefer."""
    plain = isinstance(value, str) and value.isprintable() and not set(value) & {'"', "\\"}
    return f'"{value}"' if plain else repr(value)


def _joined(
    opened: str, items: list[str], closed: str, indent: int, comma: str = "", noted: Mapping[int, str] | None = None
) -> str:
    line = f"{opened}{', '.join(items)}{comma}{closed}"
    if indent + len(line) <= _WIDTH and not noted and not any("\n" in one for one in items):
        return line
    inner = "".join(f"{' ' * (indent + 4)}{one},{(noted or {}).get(at, '')}\n" for at, one in enumerate(items))
    return f"{opened}\n{inner}{' ' * indent}{closed}"


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
