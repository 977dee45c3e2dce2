"""Frozen parameters are written once; every step is whole by itself, verified, and the same to the bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.best import KeepBest
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import check_params, restore_params, verify_latest
from axlearn_like.checkpoint.remote import RemoteTier
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows

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


def test_a_remote_tier_holds_them_once(tmp_path: Path):
    here, away = tmp_path / "here", tmp_path / "away"
    events = EventLog(tmp_path / "events.jsonl")

    def tier(directory: Path) -> RemoteTier:
        remote = RemoteTier.Config(url=str(away), copy_every=1, keep=2)
        return remote.build(directory=directory, config="a: 1\n", events=events)

    def copied(*steps: int, base: int = 0) -> list[Path]:
        """Save and copy; return the objects that checkpoints share."""
        remote = tier(here)
        for step in steps:
            save(here, step, base=base)
            remote.copy(step)
        remote.close()
        return [path for path in sorted((away / "shared").iterdir()) if path.stat().st_size > 1000]

    first = copied(1, 2, 3)
    assert sorted(path.name for path in away.iterdir()) == ["2", "3", "config.txt", "shared"]
    assert not (away / "3" / "frozen").exists() and (away / "3" / "params").exists()
    assert sum(path.stat().st_size for path in first) < 60_000, "32 kB of float32, 4 kB of bfloat16, compressed"
    sizes = [row["nbytes"] for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "copied"]
    assert sizes[0] > 25_000 + max(sizes[1:])
    there = tmp_path / "there"
    assert tier(there).fetch_newer(None) == 3  # another machine's disk
    assert_same(checkpointer(there).restore(described(state(0)))[0], state(3))
    assert set(copied(4, base=7)) > set(first), "step 3 still needs them"
    assert not set(copied(5, base=7)) & set(first), "and nothing does now"
