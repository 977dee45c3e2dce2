"""Compiled programs on disk."""

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import UserError, enable_compilation_cache, make_mesh, shard_batch
from mesh.distributed import join
from mesh.programs.compilation import compiling_beside
from tests.elsewhere import in_two_processes


def test_each_of_two_processes_compiles_once_in_two_starts(tmp_path: Path) -> None:
    for first, again in zip(*(in_two_processes(compile_sum, str(tmp_path)) for _ in range(2)), strict=True):
        assert first["sum"] == again["sum"] == 28
        assert first["misses"] >= 1 and first["hits"] == 0
        assert again == {"sum": 28, "misses": 0, "hits": first["misses"]}


def compile_sum(address: str, index: int, folder: str) -> dict[str, Any]:
    """Sum over the devices of both processes; what was compiled for it, and what was found on disk."""
    os.environ["AXL_COMPILATION_CACHE"] = folder
    assert enable_compilation_cache() == Path(folder)
    join(address, index, 2)
    seen: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
    with jax.set_mesh(make_mesh({"data": 2})):
        total = float(jax.jit(jnp.sum)(shard_batch({"x": np.arange(8.0)})["x"]))
    return {"sum": total, "misses": seen["cache_misses"], "hits": seen["cache_hits"]}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AXL_COMPILATION_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"AXL_COMPILATION_CACHE=.*file/cache: cannot make this folder"):
        enable_compilation_cache()


def test_programs_are_compiled_beside_others_until_the_block_ends(capsys: pytest.CaptureFixture[str]) -> None:
    called, go = list[str](), threading.Event()

    def fail() -> None:
        called.append("fails")
        raise ValueError("no memory")

    def wait() -> None:
        called.append("waits")
        assert go.wait(10)

    with compiling_beside([fail, wait, lambda: called.append("never")]):
        deadline = time.monotonic() + 10
        while called != ["fails", "waits"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        threading.Timer(0.1, go.set).start()
    assert called == ["fails", "waits"], "what is not begun at the end is left"
    assert "a program could not be compiled: ValueError: no memory" in capsys.readouterr().out
