"""Setup of all tests: CPU only, a compilation cache that outlives the run, the markers `slow` and `full`.

This file imports neither jax nor a package of the project: the environment must be set before the
first import of jax.
"""

import functools
import gc
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadFileScheduling

from tests.bounds import Bounds

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A directory of its own: programs of the tests never reach a user's runs. Subprocesses inherit it.
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("AXL_COMPILATION_CACHE", str(_CACHES / "axlearn-like" / "xla-tests"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.environ["AXL_COMPILATION_CACHE"])
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # tests compile many small programs
# Ray: no figures sent out.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Figures are never shown, only written.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "axlearn-like-matplotlib"))
# Configs in run directories may name classes of the tests; nothing is remembered in the user's home.
os.environ.setdefault("AXL_CODE", "tests")
_STATE = tempfile.TemporaryDirectory(prefix="axlearn-like-state-")  # removed when this process ends
os.environ["XDG_STATE_HOME"] = _STATE.name


# Tracing makes many short-lived objects, and with all test modules in memory each full collection takes 0.3 s.
gc.set_threshold(20_000, 20, 50)

FILES: pytest.StashKey[set[Path] | None] = pytest.StashKey()  # those to look into; None: all


# A busy machine is no fault of the code: examples have no time limit.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=40)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `slow` and `full` too")
    parser.addoption("--every-file", action="store_true", help="import files too that lack the words of -k")


# Side by side (`-n 3`), a file's tests run in one process, and tests of whole runs in two, however many files: half a
# dozen processes each, with waits that assume that they get a share of the machine. Both take about as long.
RUNS_IN_TURN = (
    ("tests/chaos/", "tests/rl/runtime/test_run.py"),
    ("tests/rl/runtime/ray/",),
)
WHOLE_RUNS = tuple(path for paths in RUNS_IN_TURN for path in paths)
# Long ones first, so that no process is left alone with one at the end.
LONG = (
    *WHOLE_RUNS,
    "tests/golden/test_compiles.py",
    "tests/axlearn_like/layers/contexts/test_paged.py",
    "tests/axlearn_like/training/",
    "tests/rl/rollout/",
    "tests/rl/",
    "tests/tools/",
)


# Markers of tests that a plain run skips, and what runs them.
LEFT_OUT = {"full": "very slow: make test-full", "slow": "slow: make test-slow, or pytest -m slow"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless --full or a marker expression asks for them; put the others into an order for `-n`."""
    if not config.getoption("--full") and not config.getoption("markexpr"):
        for item in items:
            for name, reason in LEFT_OUT.items():
                if item.get_closest_marker(name) is not None:  # `item.keywords` has the names of folders too
                    item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((n for n, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG)))


class Scheduling(LoadFileScheduling):
    """Files by process; whole runs in two. (Marks `xdist_group` have no effect with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        for number, paths in enumerate(RUNS_IN_TURN):
            if nodeid.startswith(paths):
                return f"whole runs {number}"
        return super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return Scheduling(config, log)


def files_for(keywords: str, root: Path) -> set[Path] | None:
    """Return the test files below `root` whose path or text has the words of a `-k` expression; None: any may match.

    A name that is computed (a parameter's, say) stands in no file, and after `not` a word says nothing.
    """
    words = set(re.findall(r"[^\s()]+", keywords.lower()))
    if not words - {"and", "or"} or "not" in words or re.search(r"[^\w\s()]", keywords):
        return None
    every = any if "or" in words else all
    words -= {"and", "or"}
    texts = {path: f"{path.relative_to(root)}\n{path.read_text(encoding='utf-8')}" for path in root.rglob("test_*.py")}
    return {path for path, text in texts.items() if every(word in text.lower() for word in words)} or None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Bounds(), "bounds")
    if not config.getoption("full"):  # to read all modules for constants takes each process more than a second
        providers.is_local_module_file = lambda path: False  # pyright: ignore[reportPrivateImportUsage]
        settings.load_profile("quick")
    every = config.getoption("every_file")
    config.stash[FILES] = None if every else files_for(config.getoption("keyword") or "", Path(__file__).parent)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out test files that cannot have what `-k` asks for: to import all of them takes half a minute."""
    files = config.stash[FILES]
    left_out = files is not None and collection_path.name.startswith("test_") and collection_path not in files
    return True if left_out and collection_path.is_file() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Look into every file where those that have the words of `-k` have no test of that name."""
    result = yield
    distributes = session.config.pluginmanager.has_plugin("dsession")  # has no items of its own
    if not session.items and session.config.stash[FILES] is not None and not distributes:
        session.config.stash[FILES] = None
        session.perform_collect()
    return result


def pytest_collection_finish() -> None:
    """Leave out of collections what stays until the end: modules and tests."""
    gc.collect()
    gc.freeze()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    files = config.stash[FILES]
    if files is None:
        return []
    return [f"-k: from {len(files)} files that have these words; computed names of parameters need --every-file too"]


def _forget_programs() -> None:
    if (module := sys.modules.get("mesh.programs.shared")) is not None:
        module.forget_programs()


def _forgetting(change: Callable[..., None]) -> Callable[..., None]:
    """Share no programs traced with what a test replaces; variables of the environment are in no program."""

    @functools.wraps(change)
    def changed(patch: pytest.MonkeyPatch, *args: Any, **options: Any) -> None:
        change(patch, *args, **options)
        if args[:1] != (os.environ,):
            _replacing.add(patch)
            _forget_programs()

    return changed


def _undo(self: pytest.MonkeyPatch) -> None:
    _undo_all(self)
    if self in _replacing:
        _replacing.discard(self)
        _forget_programs()


_replacing = weakref.WeakSet[pytest.MonkeyPatch]()
_undo_all = pytest.MonkeyPatch.undo
for _name in ("setattr", "delattr", "setitem", "delitem"):
    setattr(pytest.MonkeyPatch, _name, _forgetting(getattr(pytest.MonkeyPatch, _name)))
pytest.MonkeyPatch.undo = _undo


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published data that some tests read: $AXL_TEST_DATA, or `shared/data` beside the checkout."""
    folder = Path(os.environ.get("AXL_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no published data in {folder} (AXL_TEST_DATA names their folder)")
    return folder


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the source tree."""
    return Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _forget_user_files(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Forget modules of files that a test has written and named: another test has files of the same names."""
    before, code = set(sys.path), os.environ.get("AXL_CODE", "tests")
    yield
    os.environ["AXL_CODE"] = code  # trusted files are added to it
    for name in ("mine", "reward"):
        sys.modules.pop(name, None)
    # gettempdir() may be a folder of a former test that has set it.
    temporary = (tempfile.gettempdir(), str(tmp_path_factory.getbasetemp()))
    sys.path[:] = [path for path in sys.path if path in before or not path.startswith(temporary)]
