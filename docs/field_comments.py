"""Extension of griffe: on the API pages the comment of a field is its description."""

import ast
import runpy
from pathlib import Path
from typing import Any

import griffe

comment_of = runpy.run_path(str(Path(__file__).with_name("hooks.py")))["comment_of"]


class FieldComments(griffe.Extension):
    """Descriptions of fields without a docstring."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:
        """Read the comment of a field of a class, or of one that its constructor sets."""
        if (
            not isinstance(node, ast.AnnAssign | ast.Assign)
            or attr.docstring
            or not (attr.parent and attr.parent.is_class)
        ):
            return
        lines = attr.lines_collection[attr.filepath] if isinstance(attr.filepath, Path) else []
        if text := comment_of(lines, node.lineno, node.end_lineno or node.lineno):
            attr.docstring = griffe.Docstring(text, lineno=node.lineno, parent=attr)
