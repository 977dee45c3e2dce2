"""What all tests share: CPU only, a compilation cache that outlives the run, the marker `full`.

This file imports neither jax nor a package of the project: the environment must be set before the
first import of jax.
"""

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A directory of its own: programs of the tests never reach a user's runs. Subprocesses inherit it.
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("AXL_COMPILATION_CACHE", str(_CACHES / "axlearn-like" / "xla-tests"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.environ["AXL_COMPILATION_CACHE"])
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Ray: no figures sent out.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Figures are never shown, only written.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "axlearn-like-matplotlib"))
# Configs in run directories may name classes of the tests; nothing is remembered in the user's home.
os.environ.setdefault("AXL_CODE", "tests")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="axlearn-like-state-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the slow tests (marker `full`) too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips slow tests unless --full or a marker expression asks for them."""
    if config.getoption("--full") or config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --full (make test-full)")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the source tree."""
    return Path(__file__).parent.parent
