"""One made-up run and its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.report.made_up_run import Page, write_run
from tools.report import write_report


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="session")
def source(run_path: Path) -> str:
    return write_report(run_path).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def page(source: str) -> Page:
    return Page(source)
