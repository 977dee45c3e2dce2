"""The table of files that are read, in docs/inside/files-that-are-read.md: each row names a test that there is."""

import ast
import re

from tests.test_floors import ROOT

PAGE = ROOT / "docs" / "inside" / "files-that-are-read.md"


def test_each_file_that_is_read_has_a_test():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4 and all(cells), row
        named = re.fullmatch(r"`(tests/\S+\.py)` `(\w+)`", cells[3])
        assert named is not None, f"expected `FILE` `test` in the last cell: {row}"
        tree = ast.parse((ROOT / named[1]).read_text(encoding="utf-8"))
        assert named[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
