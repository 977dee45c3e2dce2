"""A link, pipe or second name that others planted is neither followed nor waited for; its target stays as it was."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.files.written import UnsafeFileError, check_folder, foreign_owner, open_written, own_folder, replace_file

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
OTHER = 54321

Plant = Callable[[Path, Path], object]
PLANTED: dict[str, Plant] = {
    "a link to a file": lambda place, target: place.symlink_to(target),
    "a link to nothing": lambda place, target: place.symlink_to(target.with_name("new")),
    "a link to a link": lambda place, target: (
        place.with_name("other").symlink_to(target),
        place.symlink_to(place.with_name("other")),
    ),
    "a second name": lambda place, target: os.link(target, place),
    "a pipe": lambda place, target: os.mkfifo(place),
    "a folder": lambda place, target: place.mkdir(),
    "a link to a folder": lambda place, target: place.symlink_to(target.parent),
    "a link to a device": lambda place, target: place.symlink_to("/dev/full"),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    path = tmp_path / "theirs" / "target"
    path.write_text("kept")
    return path


@pytest.mark.parametrize("mode", ["a", "ab", "a+", "w", "wb"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_file_that_is_opened_is_no_planted_one(name: str, mode: str, tmp_path: Path, target: Path) -> None:
    PLANTED[name](tmp_path / "place", target)
    with pytest.raises(OSError, match=str(tmp_path / "place")):
        open_written(tmp_path / "place", mode)
    assert target.read_text() == "kept" and os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("name", PLANTED)
def test_a_file_that_is_replaced_loses_its_name_alone(name: str, tmp_path: Path, target: Path) -> None:
    PLANTED[name](tmp_path / "place", target)
    if name == "a folder":
        with pytest.raises(IsADirectoryError):
            replace_file(tmp_path / "place", "new")
    else:
        replace_file(tmp_path / "place", "new")
        assert (tmp_path / "place").read_text() == "new" and not (tmp_path / "place").is_symlink()
    assert target.read_text() == "kept" and os.listdir(target.parent) == ["target"]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".tmp")]


def test_what_is_made_is_private_and_what_is_there_is_kept(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for mode, content in (("a", "x"), ("ab", b"x"), ("a+", "x"), ("a", "y")):
            with open_written(tmp_path / "log", mode) as file:
                file.write(content)
        replace_file(tmp_path / "whole", b"x")
        folder = own_folder(tmp_path / "folder")
    finally:
        os.umask(before)
    assert (tmp_path / "log").read_text() == "xxxy"
    with open_written(tmp_path / "log", "w") as file:
        file.write("z")
    assert (tmp_path / "log").read_text() == "z"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"log": 0o600, "whole": 0o600, "folder": 0o700} and own_folder(folder) == folder


def test_a_folder_of_ones_own_is_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, message in (("link", "is a link"), ("file", "is a link or a file"), ("open", "written by others")):
        with pytest.raises(UnsafeFileError, match=message):
            own_folder(tmp_path / name)
    assert foreign_owner(tmp_path) is None and not list(tmp_path.glob(".owner*"))


@AS_ROOT
def test_folders_and_links_of_another_user_are_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    check_folder(tmp_path / "link")  # one's own
    for name in ("theirs", "link"):
        os.chown(tmp_path / name, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UnsafeFileError, match=f"belongs to user {OTHER}; expected a folder of user 'root'"):
        own_folder(tmp_path / "theirs")
    with pytest.raises(UnsafeFileError, match=f"is a link of user {OTHER}"):
        check_folder(tmp_path / "link")
    assert foreign_owner(tmp_path / "theirs") == f"user {OTHER}" and not os.listdir(tmp_path / "theirs")
