"""Damage is what the bytes of a checkpoint say, never the reason why they could not be read."""

import builtins
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from axlearn_like.checkpoint import manifest, reader
from axlearn_like.checkpoint.damage import find_damage
from axlearn_like.checkpoint.manifest import checksum, device_checksums, part_checksum
from axlearn_like.checkpoint.versions import CheckpointError
from tests.axlearn_like.checkpoint.test_checkpointer import abstract, data_files, make_state, save_steps
from tests.elsewhere import elsewhere

FAILURES = [
    *(kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    lambda: RuntimeError("Unable to initialize backend 'forbidden'"),
    lambda: ValueError("NOT_FOUND: Error opening: does not exist"),
    lambda: ValueError("DATA_LOSS: checksum"),
    lambda: OSError(24, "Too many open files"),
]


def raised(make: Any) -> Any:
    try:
        return make()
    except TypeError:  # UnicodeDecodeError, ExceptionGroup
        if not issubclass(make, UnicodeError):
            return make("several", [ValueError("one")])
        where: tuple[Any, ...] = (b"x" if make is UnicodeDecodeError else "x", 0, 1, "odd")
        return make(*where) if make is UnicodeTranslateError else make("utf-8", *where)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_steps(folder, [2, 4]).close()
    return folder


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Exempt what other tests hold from collections: a failed read makes several, of seconds each among many tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("few_objects")
def test_no_error_of_reading_leads_to_advice_to_throw_a_good_checkpoint_away(
    saved: Path, monkeypatch: pytest.MonkeyPatch
):
    for make in FAILURES:
        monkeypatch.setattr("axlearn_like.checkpoint.reader._UNDER_WAY", 0.0)
        error = raised(make)

        def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
        with pytest.raises(CheckpointError) as caught:
            reader.read_items(saved / "4", {"params": abstract(make_state())["params"]})
        said = str(caught.value)
        assert type(error).__name__ in said and "its files are as they were written: keep it" in said
        assert not any(word in said.lower() for word in ("damaged", "delete", "remove", "move"))
        monkeypatch.setattr("axlearn_like.checkpoint.reader.find_damage", fail)  # nor where the second look fails, too
        with pytest.raises(CheckpointError, match="that does not mean damage: keep it"):
            reader.read_items(saved / "4", {"params": abstract(make_state())["params"]})
        monkeypatch.undo()


def test_memory_that_holds_other_bits_than_the_files_is_no_damage(saved: Path, monkeypatch: pytest.MonkeyPatch):
    restore = ocp.Checkpointer.restore

    def flipped(*args: Any, **kwargs: Any) -> Any:
        found = restore(*args, **kwargs)
        found["params"]["head"] = found["params"]["head"].at[0, 0].add(1)
        return found

    monkeypatch.setattr(ocp.Checkpointer, "restore", flipped)
    with pytest.raises(
        CheckpointError, match=r"cannot be read .*'head' does not match .*as they were written: keep it"
    ):
        reader.read_items(saved / "4", {"params": abstract(make_state())["params"]})


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "remove", "manifest", "manifest of something else", "extras"])
def test_bytes_that_are_not_what_was_written_are_damage(tmp_path: Path, harm: str):
    save_steps(tmp_path, [2]).close()
    step = tmp_path / "2"
    assert find_damage(step) is None
    reader.verify_latest(tmp_path)
    largest = max(data_files(step), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    match harm:
        case "flip":
            content[len(content) // 2] ^= 1
            largest.write_bytes(content)
        case "cut" | "empty":
            largest.write_bytes(content[: len(content) // 3 if harm == "cut" else 0])
        case "remove":
            largest.unlink()
        case "manifest":
            (step / "manifest" / "metadata").write_text("{")
        case "manifest of something else":
            (step / "manifest" / "metadata").write_text("[1, 2]")
        case _:
            (step / "extras" / "metadata").unlink()
    assert find_damage(step) is not None
    with pytest.raises(
        CheckpointError, match=r"2 is damaged \(.*\); no older one is good. Move \S+2 away to begin again"
    ):
        reader.verify_latest(tmp_path)


@pytest.mark.slow
def test_checksums_of_host_and_device_agree():
    numbers = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int8", "uint8", "bool", "int32", "float16", "uint32"):
        shape = random.Random(dtype).choice([(3,), (5, 7), (2, 3, 4), ()])
        array = numbers.normal(size=shape).astype(jnp.dtype(dtype))
        assert part_checksum(np.asarray(array).reshape(-1), [1], 0) == int(checksum(jnp.asarray(array))), dtype
    large = np.arange(5_000_000, dtype=np.int32)  # more than a block
    assert part_checksum(large.reshape(-1), [1], 0) == int(checksum(jnp.asarray(large)))


@pytest.mark.slow
def test_a_manifest_of_arrays_in_memory_compiles_no_program(monkeypatch: pytest.MonkeyPatch):
    tree = {"params": jnp.arange(6.0).reshape(2, 3), "step": np.int32(2)}
    monkeypatch.setattr(manifest, "_checksums", None)
    assert {name: entry["checksum"] for name, entry in manifest.make_manifest(tree).items()} == {
        name: int(checksum(jnp.asarray(leaf))) for name, leaf in tree.items()
    }


def sums_on_two_devices() -> list[int]:
    there = [jax.device_put(np.arange(7 * n + 1, dtype=np.float32), jax.devices()[n % 2]) for n in range(4)]
    return device_checksums([*there, jnp.arange(3)])


@pytest.mark.slow
def test_arrays_on_several_groups_of_devices_have_checksums():
    arrays = [*(np.arange(7 * n + 1, dtype=np.float32) for n in range(4)), np.arange(3, dtype=np.int32)]
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert elsewhere(sums_on_two_devices, environ=two) == [part_checksum(one, [1], 0) for one in arrays]
