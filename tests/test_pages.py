"""Pages of concepts are short, so that a reader gets through one; the site works without a network, its search too."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
LIMIT = 1500
# Longer pages, by words: a list to be shortened, never added to.
LONGER: dict[str, int] = {}


@pytest.mark.parametrize("folder", ["concepts", "inside"])
def test_pages_are_at_most_1500_words_long(folder: str) -> None:
    words = {f"{folder}/{path.name}": len(path.read_text().split()) for path in (DOCS / folder).glob("*.md")}
    assert len(words) > 10
    assert {page: count for page, count in words.items() if count > LONGER.get(page, LIMIT)} == {}
    assert [page for page in LONGER if words.get(page, LIMIT + 1) <= LIMIT] == [], "short now: remove them from LONGER"


def test_search_works_from_the_file() -> None:
    """The plugin would take the worker's stand-in from elsewhere if ours were not named."""
    assert "offline" in SITE["plugins"]
    [shim] = [path for path in SITE["extra"]["polyfills"] if "iframe-worker" in path]
    assert "window.IFrameWorker" in (DOCS / shim).read_text()


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """Hooks of mkdocs, which generate the API pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_an_api_page(hooks: ModuleType) -> None:
    """A page shows a package's modules, and of these all names without an underscore, documented or not."""
    shown = "".join(hooks.page(package) for package in hooks.packages())
    modules = {line.removeprefix("::: ") for line in shown.splitlines() if line.startswith("::: ")}
    paths = [path for room in hooks.ROOMS for path in (ROOT / room).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    assert sorted(names - modules) == []
    [plugin] = [plugin for plugin in SITE["plugins"] if not isinstance(plugin, str)]
    options = plugin["mkdocstrings"]["handlers"]["python"]["options"]
    assert options["show_if_no_docstring"] and options["filters"] == ["!^_"]


def test_a_comment_is_the_description_of_its_field(hooks: ModuleType) -> None:
    lines = [
        "@dataclass",
        "class Lease:",
        "    id: int",
        "    # Those to continue;",
        "    # none for new ones",
        "    partial: x = y(",
        "        z",
        "    )",
        "    seconds: float = 0.0  # from its grant",
    ]
    assert [hooks.comment_of(lines, *place) for place in ((3, 3), (6, 8), (9, 9))] == [
        "",
        "Those to continue; none for new ones",
        "from its grant",
    ]
