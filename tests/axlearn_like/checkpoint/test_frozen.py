"""Frozen parameters are written once; every step is whole by itself, verified, and the same to the bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import check_params, restore_params, verify_latest
from axlearn_like.checkpoint.versions import CheckpointError

FROZEN = ("layers/inner/w", "embed")


def state(step: int, base: int = 0) -> dict:
    frozen, trained = np.random.default_rng(base), np.random.default_rng(1000 + step)
    params = {
        "layers": {
            "inner": {"w": jnp.asarray(frozen.normal(size=(4, 40, 50)), jnp.float32)},
            "lora": {"w_a": jnp.asarray(trained.normal(size=(4, 40, 2)), jnp.float32)},
        },
        "embed": jnp.asarray(frozen.normal(size=(30, 70)), jnp.bfloat16),
    }
    return {"step": jnp.int32(step), "params": params}


def described(tree: dict) -> dict:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def checkpointer(path: Path, *, asynchronous: bool = False, keep: int = 2) -> Checkpointer:
    made = Checkpointer.Config(keep=keep, asynchronous=asynchronous).build(directory=path)
    made.frozen = FROZEN
    return made


def save(path: Path, *steps: int, base: int = 0, **settings: bool) -> None:
    """Save as one process of a run."""
    saving = checkpointer(path, **settings)
    for step in steps:
        saving.save(step, state(step, base), {"input": step})
    saving.close()


def inodes(step: Path) -> set[int]:
    """Return the files with arrays; Orbax writes small ones about the save itself."""
    files = [path.stat() for path in (step / "frozen").rglob("*") if path.is_file()]
    return {file.st_ino for file in files if file.st_size > 1000}


def assert_same(found: dict, expected: dict) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_they_are_written_once_also_by_a_process_that_resumes(tmp_path: Path, asynchronous: bool):
    save(tmp_path, 1, 2, asynchronous=asynchronous)
    first = inodes(tmp_path / "2")
    save(tmp_path, 3, 4, asynchronous=asynchronous)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"], "the step that they were written in is gone"
    assert first and inodes(tmp_path / "4") == inodes(tmp_path / "3")
    assert inodes(tmp_path / "3") == first
    found, extras = checkpointer(tmp_path).restore(described(state(0)))
    assert_same(found, state(4))
    assert extras == {"input": 4}


def test_a_step_is_whole_wherever_it_is(tmp_path: Path):
    save(tmp_path / "rl", 1, 2)
    KeepBest.Config(metric="reward").build(directory=tmp_path / "rl").offer(2, 1.0)
    for path in (tmp_path / "rl", tmp_path / "rl" / "best", tmp_path / "rl" / "1"):
        expected = state(1 if path.name == "1" else 2)["params"]
        assert_same(restore_params(path), expected)
        assert_same(restore_params(path, described(expected)), expected)
        check_params(path, described(expected))
    verify_latest(tmp_path / "rl")


def test_others_are_written_again(tmp_path: Path):
    save(tmp_path, 1)
    save(tmp_path, 2, base=7)
    assert not inodes(tmp_path / "1") & inodes(tmp_path / "2")
    assert_same(checkpointer(tmp_path).restore(described(state(0)))[0], state(2, base=7))


def test_damage_to_them_is_found(tmp_path: Path):
    save(tmp_path, 1)
    largest = max((p for p in (tmp_path / "1" / "frozen").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpointer(tmp_path).restore(described(state(0)))


def test_a_model_without_one_of_them_is_refused_by_name(tmp_path: Path):
    save(tmp_path, 1)
    other = described(state(0)["params"])
    other["embed"] = jax.ShapeDtypeStruct((31, 70), jnp.bfloat16)
    with pytest.raises(CheckpointError, match="'embed' has shape and dtype"):
        check_params(tmp_path, other)
