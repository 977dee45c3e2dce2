"""A program that somebody else could have put into the cache is not loaded; a compiled one takes its place."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.files.written import replace_file
from mesh.programs.compilation import load_own, use_own_entries
from tests.mesh.files.test_written import AS_ROOT, OTHER
from tests.test_floors import ROOT


def linked(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to(entry.with_name("elsewhere"))


def piped(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


PLANTED: dict[str, Callable[[Path], object]] = {
    "is a link": linked,
    "got a pipe": piped,
    "may be written by others": lambda entry: entry.chmod(0o664),
    "written by others; expected": lambda entry: entry.chmod(0o602),
}
if os.geteuid() == 0:
    PLANTED[f"belongs to user {OTHER}"] = lambda entry: os.chown(entry, OTHER, OTHER)


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_entry_is_left_out_and_replaced(said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    entry = tmp_path / "key-cache"
    replace_file(entry, b"ours")
    assert load_own(entry) == b"ours" and load_own(tmp_path / "other-cache") is None
    PLANTED[said](entry)
    with caplog.at_level(logging.WARNING):
        assert load_own(entry) is None
    assert said in caplog.text and "compiled instead" in caplog.text
    replace_file(entry, b"again")
    assert load_own(entry) == b"again" and not entry.is_symlink()


PROGRAM = """
import jax
from mesh import enable_compilation_cache
enable_compilation_cache()
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
jax.jit(lambda x: 2 * x + 1)(3.0)
print(seen.count("cache_hits"), seen.count("cache_misses"))
"""


def compiled(**environ: str) -> str:
    """Compile a program in a process; returns how many were found, and how many written."""
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "true", **environ}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_jax_loads_no_planted_program(tmp_path: Path):
    """Each start compiles what it may not load; the entries of a program that ran before are planted."""
    folder = str(tmp_path / "cache")
    first = compiled(AXL_COMPILATION_CACHE=folder)
    count = first.partition(" ")[2]
    assert first == f"0 {count}" and int(count) >= 1
    assert compiled(AXL_COMPILATION_CACHE=folder) == f"{count} 0"
    for entry in Path(folder).glob("*-cache"):
        linked(entry)
    assert compiled(AXL_COMPILATION_CACHE=folder) == first
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@pytest.mark.slow
def test_a_folder_in_which_others_may_write_is_refused(tmp_path: Path):
    tmp_path.chmod(0o777)
    with pytest.raises(Exception, match=rf"others may write it.*chmod go-w {tmp_path}"):
        use_own_entries(tmp_path, chosen=True)
    assert "others may write it" in compiled(AXL_COMPILATION_CACHE=str(tmp_path)) and not list(tmp_path.iterdir())
    assert compiled(AXL_COMPILATION_CACHE="", XDG_CACHE_HOME=str(tmp_path)).startswith("0 ")
    own = tmp_path / "axlearn-like" / "xla"
    own.chmod(0o775)
    assert not compiled(AXL_COMPILATION_CACHE="", XDG_CACHE_HOME=str(tmp_path)).startswith("0 ")
    assert stat.S_IMODE(own.stat().st_mode) == 0o755, "one's own default is narrowed"


@AS_ROOT
def test_the_folder_of_another_user_is_refused(tmp_path: Path):
    os.chown(tmp_path, OTHER, OTHER)
    with pytest.raises(Exception, match=f"it belongs to user {OTHER}, whose programs could run code as user 'root'"):
        use_own_entries(tmp_path, chosen=True)
