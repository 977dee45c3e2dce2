"""MkDocs hook: one API page for each package of the project, with everything public in its modules."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests read this file where mkdocs is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
ROOMS = ("mesh", "axlearn_like", "models", "rl", "experiments", "tools/run")


def packages() -> list[str]:
    """Return the dotted names of all packages of the rooms, parents first."""
    inits = sorted(path for room in ROOMS for path in (ROOT / room).rglob("__init__.py"))
    return [".".join(path.parent.relative_to(ROOT).parts) for path in inits]


def page(package: str) -> str:
    """Return the Markdown of a package's page: its own docstring, then each module below it that is not a package."""
    folder = ROOT / package.replace(".", "/")
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    blocks = [f"::: {package}\n    options: {{show_submodules: false, members: false}}\n"]
    blocks += [f"::: {package}.{module}\n    options: {{heading_level: 2}}\n" for module in modules]
    return "\n".join(blocks)


def comment_of(lines: list[str], first: int, last: int) -> str:
    """Return the comment behind the statement of these lines, or above it; "" if there is none."""
    _, mark, behind = lines[last - 1].partition("  # ")
    if mark:
        return behind.strip()
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return " ".join(above)


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Add the API pages to the navigation, a section for each room."""
    names = [room.replace("/", ".") for room in ROOMS]
    entries = [{room: [{p: f"api/{p}.md"} for p in packages() if f"{p}.".startswith(f"{room}.")]} for room in names]
    assert config.nav is not None
    config.nav.append({"API": entries})
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Generate the API pages."""
    from mkdocs.structure.files import File

    for package in packages():
        files.append(File.generated(config, f"api/{package}.md", content=page(package)))
    return files
