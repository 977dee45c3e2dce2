"""The layout of the rooms: no file imports itself by way of others, no folder or signature grows beyond a glance.

Imports are read from the source by `ast`: those inside functions and under TYPE_CHECKING count too.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.source_files import imports
from tests.test_floors import FLOORS, ROOT, module_name

LIMIT = 15
MOST_PARAMETERS = 8

LIBRARY = ("mesh", "axlearn_like", "models", "rl")
# Lines at most. Still above its bound: all rooms (105,000); set when it is reached.
MOST_LINES: dict[str, int | None] = {"CHANGELOG.md": 300, "tools": 17_000, "all rooms": None}


def import_graph(sources: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return {module: {imported module: line}} for {path: source}; a package is its `__init__`.

    `from package import module` is an import of the module alone: every import of anything in a package runs its
    `__init__` first, so that this is no arrow.
    """
    modules = {module_name(path).removesuffix(".__init__"): path for path in sources}
    graph: dict[str, dict[str, int]] = {module: {} for module in modules}
    for module, path in modules.items():
        for line, origin, names in imports(sources[path], module_name(path)):
            for name in [f"{origin}.{name}" for name in names] or [origin]:
                target = name if name in modules else origin
                if target in modules and target != module:
                    graph[module].setdefault(target, line)
    return graph


def circles(graph: Mapping[str, Mapping[str, int]]) -> set[frozenset[str]]:
    """Return the sets of modules that reach each other."""

    def reached(module: str) -> set[str]:
        found, left = set(), list(graph[module])
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += graph[name]
        return found

    reach = {module: reached(module) for module in graph}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }


def folder_graph(graph: Mapping[str, Mapping[str, int]], packages: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return {folder: {imported folder: the first import}} for the folders of a room; its own files are in none."""
    folders = {name for name in packages if name.count(".") == 1}
    of = {module: ".".join(module.split(".")[:2]) for module in graph}
    found: dict[str, dict[str, str]] = {folder: {} for folder in folders}
    for module, imported in graph.items():
        for target, line in imported.items():
            if of[module] != of[target] and {of[module], of[target]} <= folders:
                found[of[module]].setdefault(of[target], f"  {module}:{line} imports {target}")
    return found


def mutual(arrows: Mapping[str, Mapping[str, str]]) -> dict[frozenset[str], str]:
    """Return the pairs of folders that import each other, each with an import in both directions."""
    return {
        frozenset((a, b)): f"{first}\n{arrows[b][a]}"
        for a, imported in arrows.items()
        for b, first in imported.items()
        if a < b and a in arrows[b]
    }


def described(circle: frozenset[str], graph: Mapping[str, Mapping[str, int]]) -> str:
    """Return the imports inside a circle, one a line."""
    arrows = [(a, b, line) for a in sorted(circle) for b, line in sorted(graph[a].items()) if b in circle]
    return "\n".join(f"  {a}:{line} imports {b}" for a, b, line in arrows)


def entries(folder: Path) -> list[str]:
    """Return the names of files and folders, without markers of packages and what Python writes."""
    kept = [path for path in folder.iterdir() if path.name not in ("__init__.py", "py.typed", "__pycache__")]
    # A folder whose files have moved away may still hold byte code.
    return sorted(p.name for p in kept if any(q.is_file() and q.suffix != ".pyc" for q in (p, *p.rglob("*"))))


@cache
def _house() -> tuple[dict[str, dict[str, int]], frozenset[str]]:
    """Return the imports of all rooms, and the names of their packages."""
    paths = [path.relative_to(ROOT).as_posix() for room in FLOORS for path in (ROOT / room).rglob("*.py")]
    packages = {module_name(path).removesuffix(".__init__") for path in paths if path.endswith("__init__.py")}
    return import_graph({path: (ROOT / path).read_text(encoding="utf-8") for path in paths}), frozenset(packages)


def test_no_import_circle():
    graph, _ = _house()
    found = circles(graph)
    assert not found, "\n".join(f"circle:\n{described(circle, graph)}" for circle in found)


def test_no_two_folders_import_each_other():
    graph, packages = _house()
    found = mutual(folder_graph(graph, packages))
    assert not found, "\n".join(f"{sorted(pair)}:\n{lines}" for pair, lines in found.items())


def test_every_import_of_the_project_is_there():
    sources = {
        path: path.read_text(encoding="utf-8") for room in (*FLOORS, "tests") for path in (ROOT / room).rglob("*.py")
    }
    modules = {module_name(path.relative_to(ROOT).as_posix()).removesuffix(".__init__") for path in sources}
    missing = [
        f"{path.relative_to(ROOT)}:{line} imports {origin}"
        for path, source in sources.items()
        for line, origin, _ in imports(source, module_name(path.relative_to(ROOT).as_posix()))
        if origin.split(".")[0] in (*FLOORS, "tests") and origin not in modules
    ]
    assert missing == []


def test_no_folder_grows_beyond_a_glance():
    packages = {path.parent for room in FLOORS for path in (ROOT / room).rglob("__init__.py")}
    assert len(packages) > len(FLOORS)
    sizes = {path.relative_to(ROOT).as_posix(): len(entries(path)) for path in packages}
    large = {folder for folder, size in sizes.items() if size > LIMIT}
    assert not large, f"over {LIMIT} entries: {large}"


def test_no_two_classes_of_the_library_have_one_name():
    found: dict[str, list[str]] = {}
    for path in sorted(path for room in LIBRARY for path in (ROOT / room).rglob("*.py")):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert len(found) > 500
    assert twice == {}


def test_tests_mirror_the_tree():
    folders = {
        path.parent.relative_to(ROOT / "tests") for room in FLOORS for path in (ROOT / "tests" / room).rglob("*.py")
    }
    assert len(folders) > 40
    assert [folder.as_posix() for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []


def lines_of(path: Path) -> int:
    """Return the lines of a text, or of all Python files in a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_rooms_stay_light():
    sizes = {"CHANGELOG.md": lines_of(ROOT / "CHANGELOG.md"), **{room: lines_of(ROOT / room) for room in FLOORS}}
    sizes["all rooms"] = sum(sizes[room] for room in FLOORS)
    assert sizes["tools"] > 1000 and sizes["all rooms"] > 10 * sizes["CHANGELOG.md"]
    heavy = {name: sizes[name] for name, most in MOST_LINES.items() if most is not None and sizes[name] > most}
    assert not heavy, f"lines over {MOST_LINES}: {heavy}; take out as many as you add"


def test_lines_are_counted(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("a\n\nb\n")
    (tmp_path / "b.py").write_text("c\n")
    (tmp_path / "c.md").write_text("d\ne\n")
    assert lines_of(tmp_path) == 4 and lines_of(tmp_path / "c.md") == 2


def test_a_circle_is_found():
    sources = {
        "rl/a.py": "def f():\n    from rl.b import x",
        "rl/b.py": "if TYPE_CHECKING:\n    from rl import c",
        "rl/c.py": "import rl.a\nimport rl.d",
        "rl/d.py": "import jax",
        "rl/p/__init__.py": "from rl.p.q import x",
        "rl/p/q.py": "from rl.p import r",
        "rl/p/r.py": "from . import y",
    }
    graph = import_graph(sources)
    assert graph["rl.b"] == {"rl.c": 2} and graph["rl.p.q"] == {"rl.p.r": 1}
    assert circles(graph) == {frozenset({"rl.a", "rl.b", "rl.c"}), frozenset({"rl.p", "rl.p.q", "rl.p.r"})}
    assert "rl.a:2 imports rl.b" in described(frozenset({"rl.a", "rl.b", "rl.c"}), graph)
    assert circles(import_graph({**sources, "rl/b.py": "", "rl/p/r.py": ""})) == set()


def test_folders_that_import_each_other_are_found():
    sources = {
        **{f"rl/{folder}/__init__.py": "" for folder in "abc"},
        "rl/a/x.py": "from rl.b import y",
        "rl/b/y.py": "from rl.c.z import one",
        "rl/b/w.py": "def f():\n    from rl.a.v import one",
        "rl/a/v.py": "from rl.top import one",
        "rl/c/z.py": "",
        "rl/top.py": "from rl.a.v import other",
    }
    packages = {"rl", "rl.a", "rl.b", "rl.c"}
    found = mutual(folder_graph(import_graph(sources), packages))
    assert found == {frozenset({"rl.a", "rl.b"}): "  rl.a.x:1 imports rl.b.y\n  rl.b.w:2 imports rl.a.v"}
    assert mutual(folder_graph(import_graph({**sources, "rl/b/w.py": ""}), packages)) == {}


def test_entries_are_counted(tmp_path: Path):
    for name in ("__init__.py", "a.py", "room/b.py", "__pycache__/a.pyc", "gone/__pycache__/b.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert entries(tmp_path) == ["a.py", "room"]


def signatures(source: str) -> Iterator[tuple[str, int]]:
    """Yield (Class.function, parameters) of every function; `self`, `cls`, `*args` and `**kwargs` do not count.

    Functions that return a config, and nothing else, are left out: their parameters are its fields.
    """

    def makes_config(child: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        named = child.returns.value if isinstance(child.returns, ast.Subscript) else child.returns
        return named is not None and ast.unparse(named).rpartition(".")[2] in ("Config", "ConfigBase")

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not makes_config(child):
                given = child.args.posonlyargs + child.args.args
                bound = bool(given) and given[0].arg in ("self", "cls")
                yield ".".join(inner), len(given) - bound + len(child.args.kwonlyargs)
            yield from walk(child, inner)

    return walk(ast.parse(source), ())


def test_no_signature_grows_beyond_a_glance():
    long = {
        f"{path.relative_to(ROOT)}: {name}": count
        for room in FLOORS
        for path in (ROOT / room).rglob("*.py")
        for name, count in signatures(path.read_text(encoding="utf-8"))
        if count > MOST_PARAMETERS
    }
    assert not long, f"over {MOST_PARAMETERS} parameters; group what travels together in a frozen dataclass: {long}"


def test_parameters_are_counted():
    source = """
class A:
    x: int = 0
    def f(self, a, /, b, *rest, c, d=1, **more):
        async def g(cls, e): ...
        return lambda x, y, z: x
def h(own, self): ...
def made(a, b) -> ConfigBase[int]: ...
def layer(a) -> Layer.Config: ...
def several(a) -> list[Layer.Config]: ...
"""
    assert dict(signatures(source)) == {"A.f": 4, "A.f.g": 1, "h": 2, "several": 1}
