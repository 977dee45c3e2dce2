"""Reading of source files for tests of their layout and language, fast enough to read all of them."""

import ast
from collections.abc import Iterator


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements of a module, those inside functions included, and no expression: a tenth of `ast.walk`."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):  # of a lambda or a conditional expression it is none
                left += inner


def imports(source: str, module: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (line, module, names) of every import in the source of `module`; no names: `import module`."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in a.b.c: one dot is the package a.b.
            base = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, origin, [alias.name for alias in node.names]
