"""Executables that were compiled elsewhere: which are used, and which are compiled here instead."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh.programs import executables
from mesh.programs.executables import VARIABLE, executable_name, find_executable, keep_executables
from mesh.programs.stored import StoredPrograms

DEVICES = jax.devices()[:1]


def doubled(x: Any) -> Any:
    """Return twice the array."""
    return 2 * x


def kept(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int = 4) -> tuple[Path, jax.stages.Lowered]:
    """Compile a function of so many numbers; returns its file, and what it was lowered to."""
    lowered = jax.jit(doubled).lower(jnp.arange(size))
    (path,) = keep_executables([lowered], DEVICES, folder)
    monkeypatch.setenv(VARIABLE, str(folder))
    return path, lowered


def test_an_executable_for_another_processor_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program with instructions that this one lacks would load, and kill the process when it runs."""
    path, lowered = kept(tmp_path, monkeypatch)
    assert find_executable(lowered, DEVICES) is not None
    features = executables._processor()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(executables, "_processor", lambda: features + " amx_of_tomorrow")
    assert executable_name(lowered, DEVICES) != path.name
    assert find_executable(lowered, DEVICES) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_executable_is_named_and_not_loaded(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, lowered = kept(tmp_path, monkeypatch)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    changed = {"cut": content[:-9], "flipped": content, "empty": b"", "other": b"x" * 200}
    path.write_bytes(changed[damage])
    assert find_executable(lowered, DEVICES) is None
    assert f"{path} is not used" in capsys.readouterr().out


def test_a_program_of_other_arguments_is_compiled_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, _ = kept(tmp_path, monkeypatch)
    other, lowered = kept(tmp_path, monkeypatch, size=5)
    function, programs = jax.jit(doubled), StoredPrograms(DEVICES)
    np.testing.assert_array_equal(programs.call(function, jnp.arange(4)), [0, 2, 4, 6])
    assert programs.loaded == 1
    other.write_bytes(path.read_bytes())  # under the name of a program that it is not
    for _ in range(2):
        np.testing.assert_array_equal(programs.call(function, jnp.arange(5)), [0, 2, 4, 6, 8])
    assert programs.loaded == 1
    assert capsys.readouterr().out.count("does not take these arguments") == 1
    assert find_executable(lowered, DEVICES) is not None  # it loads; the call is what refuses it
