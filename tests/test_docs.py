"""The code in README, tutorials and how-tos runs, and the files that any page names exist.

In a page's fences, `python title="mine.py"` is saved as that file, other `python` is executed in order, and each line
`$ axl ...` of a `console` fence must succeed in the folder with the saved files. With `--full` the `sh` and `console`
fences of a page run in order, in one folder; `UNRUN` has pages whose `sh` cannot. `text` fences are for reading only.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from axlearn_like.config import trusted_code
from tools import cli
from tools.commands import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "how-to").glob("*.md"))
ALL_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = ("axlearn_like", "rl", "models", "mesh", "experiments", "tools", "tests", "examples", "docs")
# Commands that train instead of reading a config; only with --full.
SLOW = ("rl", "train")


# Pages whose `sh` fences no test runs, and why; a list to be shortened, never added to.
UNRUN = {
    "docs/how-to/bring-a-reward.md": "300 steps of small_llama, and EXPERIMENT is the reader's",
    "docs/how-to/move-to-a-tpu.md": "TPU compilations of whole models, and clusters",
    "docs/how-to/small-model.md": "downloads, and 700 CPU seconds of training",
}


class Fence(NamedTuple):
    """A fenced code block."""

    language: str
    title: str
    text: str


def fences(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, with included files in place."""
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)
    include = re.compile(r'^--8<-- "([^"]+)"\n', re.MULTILINE)
    return [
        Fence(language, title, include.sub(lambda m: (ROOT / m.group(1)).read_text(), text))
        for language, title, text in found
    ]


def save_files(page: Path, folder: Path) -> None:
    """Write the titled blocks of a page into a folder."""
    for fence in fences(page):
        if fence.title:
            (folder / fence.title).write_text(fence.text)


def commands(page: Path) -> list[list[str]]:
    """Return the `axl` commands of a page's console fences, without `axl`."""
    lines = [line for fence in fences(page) if fence.language == "console" for line in fence.text.splitlines()]
    return [shlex.split(line.removeprefix("$ axl ")) for line in lines if line.startswith("$ axl ")]


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


CASES = [
    pytest.param(
        page, command, id=f"{page.stem}: {shlex.join(command)}", marks=[pytest.mark.full] * (command[0] in SLOW)
    )
    for page in PAGES
    for command in commands(page)
]


TITLED = {Path(fence.title).stem for page in PAGES for fence in fences(page) if fence.title}


@pytest.fixture
def a_new_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """An empty folder to work in, and code that is trusted or imported only until the end of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(trusted_code.VARIABLE, "")
    monkeypatch.setattr(trusted_code, "_files", {})
    monkeypatch.setattr(trusted_code, "_offered", {})
    others = [place for place in sys.path if any((Path(place) / f"{name}.py").is_file() for name in TITLED)]
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in others])
    for name in TITLED:  # of other tests
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    for name in TITLED:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("page", "command"), CASES)
def test_a_command_of_a_page_succeeds(
    page: Path, command: list[str], a_new_user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_files(page, a_new_user)
    status = cli.main(command)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert printed.out.strip()


def snippets(page: Path) -> list[str]:
    """Return the Python of a page that is no file; included examples are left to test_examples.py."""
    examples = {path.read_text() for path in (ROOT / "examples").glob("*.py")}
    python = [fence for fence in fences(page) if fence.language == "python" and not fence.title]
    return [fence.text for fence in python if fence.text not in examples]


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if snippets(page)], ids=names)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All snippets of a page, in order, with the names that it has imported and defined by then."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for text in snippets(page):
        exec(compile(text, str(page), "exec"), namespace)


def files(page: Path) -> dict[str, str]:
    """Return {title: text} of the Python files of a page; included examples are left to test_examples.py."""
    examples = {path.read_text() for path in (ROOT / "examples").glob("*.py")}
    titled = [fence for fence in fences(page) if fence.language == "python" and fence.title]
    assert len({fence.title for fence in titled}) == len(titled), "a file in parts: a title once, or no title"
    return {fence.title: fence.text for fence in titled if fence.text not in examples}


@pytest.mark.parametrize("page", [page for page in PAGES if files(page)], ids=names)
def test_files_of_a_page_are_whole(page: Path, a_new_user: Path) -> None:
    """Each has its imports: nothing is missing when it is loaded."""
    for title, text in files(page).items():
        exec(compile(text, title, "exec"), {"__name__": Path(title).stem})


@pytest.mark.parametrize("page", ALL_PAGES, ids=names)
def test_every_block_of_code_says_what_it_is(page: Path) -> None:
    """An indented block, or a fence without a language, would be run by no test."""
    text = page.read_text()
    assert [line for line in re.findall(r"^```.*$", text, re.MULTILINE)[::2] if line == "```"] == []
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    items = r"^ *(?:[*-]|\d+\.) .*\n(?:(?: .*)?\n)*"
    assert re.findall(r"(?<=\n\n)    \S.*", re.sub(items, "", prose, flags=re.MULTILINE)) == []


def shell_pages() -> list[Path]:
    """Return the pages that have commands for a shell."""
    return [page for page in PAGES if any(fence.language == "sh" for fence in fences(page))]


def script(page: Path) -> str:
    """Return the commands of a page in the order in which a reader meets them."""
    texts = [fence.text for fence in fences(page) if fence.language in ("sh", "console")]
    return "".join(re.sub(r"^\$ ", "", text, flags=re.MULTILINE) for text in texts)


def test_pages_that_are_not_run_are_listed_and_have_something_to_run() -> None:
    assert set(UNRUN) <= {names(page) for page in shell_pages()} and len(UNRUN) <= 3


@pytest.mark.full
@pytest.mark.timeout(1800)  # the README trains four times
@pytest.mark.parametrize("page", [page for page in shell_pages() if names(page) not in UNRUN], ids=names)
def test_the_commands_of_a_page_run_in_order_in_one_folder(page: Path, a_new_user: Path, shared_data: Path) -> None:
    """The folder is a fresh clone's, as far as commands of pages see it: the examples are there, no runs are."""
    save_files(page, a_new_user)
    (a_new_user / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "AXL_DATA": str(shared_data)}
    done = subprocess.run(
        ["bash", "-exuo", "pipefail", "-c", script(page)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_first_experiment_is_the_same_everywhere() -> None:
    example = (ROOT / "examples" / "first_experiment.py").read_text()
    titled = [f.text for page in PAGES for f in fences(page) if f.title == "mine.py"]
    assert len(titled) == 2
    body = example.split('"""', 2)[2]
    assert all(text.split('"""', 2)[2] == body for text in titled)


def test_every_console_line_is_a_command_that_runs() -> None:
    """A console fence has nothing but `$ axl` lines, so that none is passed over."""
    for page in PAGES:
        for fence in fences(page):
            if fence.language == "console":
                assert all(line.startswith("$ axl ") for line in fence.text.splitlines()), page


def test_the_start_page_names_every_command() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    assert [name for name in COMMANDS if f"`axl {name} " not in page] == []


@functools.cache
def known_files() -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of all files and folders of the rooms, and all ends of these paths."""
    known = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*")}
    ends = {"/".join(parts[i:]) for path in known if (parts := path.split("/")) for i in range(len(parts))}
    return frozenset(known), frozenset(ends)


def missing_files(text: str) -> list[str]:
    """Return the files and folders that a page names in inline code and that do not exist.

    A name that begins with a room is a whole path; another name of a Python file is the end of one. Files of the reader
    are called `mine.py` or begin with a slash, `path/` or `runs/`. A table headed "folder of `X/`" lists folders of X.
    """
    known, ends = known_files()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    words = [word for code in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"[\w./-]+", code)]
    whole = [word for word in words if "/" in word and word.split("/")[0] in ROOMS]
    tails = [word for word in words if word.endswith(".py") and not re.search(r"^(/|path/|runs/)|(^|/)mine\.py$", word)]
    missing = [word for word in whole if word.strip("/") not in known | {*ROOMS}]
    missing += [word for word in tails if word not in whole and word not in ends]
    for folder, rows in re.findall(r"^\| folder of `([\w/]+)/` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        cells = [name for row in rows.splitlines() for name in re.findall(r"`([\w/]+)/`", row.split("|")[1])]
        missing += [f"{folder}/{name}" for name in cells if f"{folder}/{name}" not in known]
    return missing


@pytest.mark.parametrize("page", ALL_PAGES, ids=names)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert missing_files(page.read_text()) == []


def test_a_file_that_does_not_exist_is_found() -> None:
    text = "`rl/runtime/run.py`, `run.py`, `rl/`, `rl/gone.py:X`, `gone.py`, `rl/gone/` and `mine.py`\n\n"
    table = "| folder of `rl/` | holds |\n|---|---|\n| `protocol/`, `lost/` | x |\n"
    assert missing_files(text + table) == ["rl/gone.py", "rl/gone/", "gone.py", "rl/lost"]
