"""Configs in notebooks: a tree of fields that opens and closes."""

from collections.abc import Sequence
from html import escape
from typing import cast

from axlearn_like.config.tree import Node, config_items


def config_html(cfg: Node, name: str = "") -> str:
    """Return a config as markup; `name`: of the field that holds it."""
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
