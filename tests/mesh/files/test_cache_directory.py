"""Caches find a place even where HOME cannot be written."""

import logging
from pathlib import Path

import pytest

from mesh.files.cache_directory import cache_directory


def test_it_is_below_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("xla") == tmp_path / "axlearn-like" / "xla"
    assert (tmp_path / "axlearn-like" / "xla").is_dir()


def test_without_a_home_it_is_below_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")  # nothing can be made below a file, by root neither
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        place = cache_directory("tokens")
    assert place.is_dir() and place.is_relative_to(tmp_path)
    assert "cannot write to /dev/null/.cache/axlearn-like/tokens" in caplog.text
