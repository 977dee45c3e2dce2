"""Caches find a place even where HOME cannot be written."""

import logging
import os
from pathlib import Path

import pytest

from mesh.files.cache_directory import cache_directory
from mesh.files.written import UnsafeFileError


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


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled programs are loaded from there."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planted = tmp_path / f"axlearn-like-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(UnsafeFileError, match="may be written by others"):
        cache_directory("xla")
    planted.rmdir()
    planted.symlink_to(tmp_path)
    with pytest.raises(UnsafeFileError, match="is a link"):
        cache_directory("xla")
    assert not (tmp_path / "xla").exists()
