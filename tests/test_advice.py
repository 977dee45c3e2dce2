"""No message advises to delete what may be good: it is moved or renamed, or another place is named."""

import ast
import re
from pathlib import Path

import pytest

PACKAGES = ("axlearn_like", "rl", "models", "mesh", "experiments", "tools")
ADVICE = re.compile(
    r"(?:^|[;,:.(] *|\b(?:and|or|to|then|please|must|should|can) )"
    r"(?:delete|remove|erase|overwrite|wipe|discard|throw away|rm)\b(?! of)",
    re.IGNORECASE,
)
# Part of a message -> the reason why it is no advice, or advice that harms nothing.
ALLOWED: dict[str, str] = {
    "overwrite the tests": "the name of an attack on the sandbox",
    "Remove rows in whose field this is found": "help of `axl data filter`, whose input stays as it is",
    "rm -f {}": "a script's own marker in its own folder",
    'rm -f "$failed"': "the same, in the script of a container",
}


def messages(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of the strings of a module, but docstrings; what is put into an f-string is `{}`."""
    tree = ast.parse(source)
    left: list[ast.AST] = [tree]
    found: list[tuple[int, str]] = []
    while left:
        node = left.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in node.values]
            found.append((node.lineno, "".join(map(str, parts))))
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            found.append((node.lineno, node.value))
        left += ast.iter_child_nodes(node)
    return found


def advises(text: str) -> bool:
    """Return True if a message advises to delete something."""
    return ADVICE.search(text) is not None


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("{} exists already; name another directory, or remove it", True),
        ("{} is damaged: {} is not what was written; delete {}/{} there to go on", True),
        ("If it is certainly gone, delete {}", True),
        ("Delete {} to begin again", True),
        ("{} is still being deleted", False),
        ("move {} away, and it is tokenised again", False),
        ("a config field cannot be deleted", False),
    ],
)
def test_advice_is_known_from_other_words(text: str, bad: bool) -> None:
    assert advises(text) == bad


def test_no_message_advises_to_delete_what_may_be_good(checkout: Path) -> None:
    found = [
        f"{path.relative_to(checkout)}:{line}: {text[:200]!r}"
        for package in PACKAGES
        for path in sorted((checkout / package).rglob("*.py"))
        for line, text in messages(path.read_text(encoding="utf-8"))
        if advises(text) and not any(known in text for known in ALLOWED)
    ]
    assert not found, "say how to keep it (move, rename, another path):\n" + "\n".join(found)
