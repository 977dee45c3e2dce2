"""Files of strangers: only regular ones, only up to a size, and no JSON that ends the stack."""

import os
import socket
from pathlib import Path

import pytest

from mesh.files.bounded import BoundsError, is_readable, parse_json, read_bounded, read_json, read_text


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_bounded(path, 5) == read_bounded(tmp_path / "link", 5) == b"12345"
    with pytest.raises(BoundsError, match="expected at most 4 bytes, got 5"):
        read_bounded(path, 4)
    assert is_readable(path) and not is_readable(tmp_path) and not is_readable(tmp_path / "\0")


def test_a_file_whose_size_the_system_does_not_say_is_bounded_too() -> None:
    assert read_text("/proc/self/status").startswith("Name:")
    with pytest.raises(BoundsError, match="expected at most 10 bytes, got more"):
        read_bounded("/proc/self/status", 10)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    listening.bind("socket")
    for name, kind in {"pipe": "a pipe", "socket": "a socket", ".": "a directory", "/dev/zero": "a device"}.items():
        with pytest.raises(BoundsError, match=f"expected a regular file, got {kind}"):
            read_bounded(tmp_path / name)
    listening.close()


def test_json_is_refused_as_a_value_error() -> None:
    for data, message in {
        b"[" * 100_000: "nested too deeply",
        b'{"a":' * 100_000: "nested too deeply",
        b"[" + b"[]," * 9 + b"[]]": "expected at most 10 objects and lists, got 11",
        b"\xff": "utf-8",
        b"1" * 5000: "limit",
        b"{": "Expecting",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_json(data, containers=10 if b"[]" in data else 1_000_000)


def test_json_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": [1, "é"]}')
    assert read_json(tmp_path / "x") == {"a": [1, "é"]}
