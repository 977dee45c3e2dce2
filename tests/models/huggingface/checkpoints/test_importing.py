"""Import and export: every tensor once, to the byte, in whatever files; killed and begun again."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import CheckpointError
from axlearn_like.config import from_text
from models.gpt2 import layer_norm_decoder
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.exporting import ExportedTokenizer, Original, export_checkpoint
from models.huggingface.checkpoints.importing import import_checkpoint
from models.huggingface.convert import by_name, from_huggingface
from models.huggingface.rows import ConversionError
from tests.models.huggingface.checkpoints.made import dense_model, make, mixture_model, write

ROOT = Path(__file__).parents[4]


def imported(source, target, **options):
    return import_checkpoint(HuggingFaceDirectory.open(source), target, **options)


def exported(source, target, **options):
    decoder = from_text((source / "config.txt").read_text())
    return export_checkpoint(SavedParams(source), decoder, target, original=Original.of(source), **options)  # pyright: ignore


def contents(folder):
    """Path -> bytes, of all files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors_below(folder):
    """Name -> dtype, shape and bytes, of all files."""
    found = HuggingFaceDirectory.open(folder).tensors
    return {name: (stored.dtype, stored.shape, stored.map().tobytes()) for name, stored in found.items()}


def test_gpt2_of_the_hub_whose_names_lack_a_prefix_is_imported(tmp_path):
    """Masks, which its files have too, are no parameters."""
    cfg = layer_norm_decoder(vocab_size=37, max_length=64, dim=16, num_layers=2, num_heads=2, hidden=24)
    tensors = make(tmp_path / "plain", cfg, dtype="F32")
    shutil.copytree(tmp_path / "plain", tmp_path / "hub")
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for layer in range(2)}
    write(tmp_path / "hub", {**{name.removeprefix("transformer."): x for name, x in tensors.items()}, **masks})
    for name in ("plain", "hub"):
        imported(tmp_path / name, tmp_path / f"{name}-run")
    exported(tmp_path / "hub-run", tmp_path / "back")
    assert tensors_below(tmp_path / "back") == tensors_below(tmp_path / "plain")


CASES = {
    "dense, one file": (dense_model, {}, 64 << 20),
    "tied, three files, chunks of rows": (lambda: dense_model(tied=True), {"files": 3}, 200),
    "mixture, chunks of some experts": (mixture_model, {"files": 2}, 1000),
    "float32 norms": (dense_model, {"dtype": "BF16", "weight": "BF16", "bias": "F32"}, 500),
    "float16": (dense_model, {"dtype": "F16"}, 64 << 20),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_tensors_and_an_export_gives_the_bytes_back(tmp_path, case):
    model, options, chunk_bytes = CASES[case]
    cfg = model()
    tensors = make(tmp_path / "hf", cfg, **options)
    done = imported(tmp_path / "hf", tmp_path / "run", chunk_bytes=chunk_bytes)
    assert done.tensors == len(tensors)
    ours = by_name(restore_params(tmp_path / "run"))
    wanted = by_name(from_huggingface(tensors, cfg))
    assert ours.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(ours[name].astype(np.float32), array, err_msg=name)
    exported(tmp_path / "run", tmp_path / "back", max_shard_size=3000)
    assert tensors_below(tmp_path / "back") == tensors_below(tmp_path / "hf")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_export_import_export_changes_no_byte(tmp_path):
    """A model of our own, which never had another form."""
    cfg = mixture_model()
    params = jax.tree.map(jnp.asarray, from_huggingface(make(tmp_path / "made", cfg, dtype="F32"), cfg))
    saver = Checkpointer.Config(asynchronous=False).build(directory=tmp_path / "checkpoints")
    saver.save(7, {"params": params, "step": jnp.int32(7)}, {})
    saver.close()
    options = {"max_shard_size": 20_000, "tokenizer": ExportedTokenizer(ids={"eos_token_id": 1})}
    first = export_checkpoint(SavedParams(tmp_path), cfg, tmp_path / "first", **options)
    assert first.architecture == "Qwen3MoeForCausalLM" and first.files > 1
    imported(tmp_path / "first", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "second", max_shard_size=20_000)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "second").iterdir())
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    assert tensors_below(tmp_path / "first") == tensors_below(tmp_path / "made")


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    tensors = make(tmp_path / "hf", dense_model(), dtype="F32")
    found = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)
    safetensors.numpy.save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    imported(tmp_path / "hf" / "model.safetensors", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "back")
    assert {name: value[2] for name, value in tensors_below(tmp_path / "back").items()} == {
        name: tensor.tobytes() for name, tensor in tensors.items()
    }


KILLED = """
import os, signal, sys
from pathlib import Path
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.importing import import_checkpoint

def kill(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

import_checkpoint(HuggingFaceDirectory.open(sys.argv[1]), Path(sys.argv[2]), chunk_bytes=1000, progress=kill)
"""


def test_after_kill_9_nothing_has_the_name_and_the_same_command_does_all(tmp_path):
    make(tmp_path / "hf", mixture_model(), files=2)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "hf"), str(tmp_path / "run")]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert not (tmp_path / "run").exists()
    (work,) = tmp_path.glob(".run.*")
    (work / "checkpoints" / "left").write_text("by another import")
    imported(tmp_path / "hf", tmp_path / "run", chunk_bytes=1000)
    assert not (tmp_path / "run" / "checkpoints" / "left").exists()
    exported(tmp_path / "run", tmp_path / "back")
    assert tensors_below(tmp_path / "back") == tensors_below(tmp_path / "hf")
    assert not list(tmp_path.glob(".*"))


def test_two_imports_at_a_time_are_refused(tmp_path):
    make(tmp_path / "hf", dense_model())

    def another(done, total):
        with pytest.raises(ConversionError, match=r"\.run\.importing: another process is importing it"):
            imported(tmp_path / "hf", tmp_path / "run")

    imported(tmp_path / "hf", tmp_path / "run", progress=another)
    assert not list(tmp_path.glob(".*"))


def test_a_dtype_may_be_chosen_but_for_what_layers_compute_with_unrounded(tmp_path):
    tensors = make(tmp_path / "hf", mixture_model(), dtype="F32")
    imported(tmp_path / "hf", tmp_path / "run", dtype="bfloat16")
    kinds = {name: array.dtype for name, array in by_name(restore_params(tmp_path / "run")).items()}
    kept = {name for name, kind in kinds.items() if kind == np.float32}
    assert kept == {name for name in kinds if name.endswith(("norm.scale", ".router.weight_de"))}
    exported(tmp_path / "run", tmp_path / "back", dtype="bfloat16")
    found = tensors_below(tmp_path / "back")
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("mlp.gate.weight"):
            assert found[name] == ("F32", tensor.shape, tensor.astype(np.float32).tobytes())
        else:
            assert found[name] == ("BF16", tensor.shape, tensor.astype(jnp.bfloat16).tobytes())
    assert '"torch_dtype": "bfloat16"' in (tmp_path / "back" / "config.json").read_text()


def test_float32_may_be_chosen_for_all_parameters(tmp_path):
    """Nothing is rounded by it, so what layers compute with unrounded is no exception."""
    tensors = make(tmp_path / "hf", mixture_model(), dtype="BF16")
    imported(tmp_path / "hf", tmp_path / "wide", dtype="float32")
    kinds = {name: array.dtype for name, array in by_name(restore_params(tmp_path / "wide")).items()}
    assert kinds == dict.fromkeys(kinds, np.float32)
    imported(tmp_path / "hf", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "back", dtype="float32")
    expected = {name: ("F32", x.shape, x.astype(np.float32).tobytes()) for name, x in tensors.items()}
    assert tensors_below(tmp_path / "back") == expected
    assert '"torch_dtype": "float32"' in (tmp_path / "back" / "config.json").read_text()


def test_what_layers_compute_with_unrounded_is_exported_as_it_was_trained(tmp_path):
    tensors = make(tmp_path / "hf", mixture_model(), dtype="F16")
    imported(tmp_path / "hf", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "trained" / "checkpoints")
    decoder = from_text((tmp_path / "run" / "config.txt").read_text())
    original, params = Original.of(tmp_path / "run"), SavedParams(tmp_path / "trained")
    export_checkpoint(params, decoder, tmp_path / "back", original=original)  # pyright: ignore[reportArgumentType]
    kinds = {name: kind for name, (kind, *_) in tensors_below(tmp_path / "back").items()}
    exact = {name for name in tensors if "norm" in name or name.endswith("mlp.gate.weight")}
    assert kinds == {name: "F32" if name in exact else "F16" for name in tensors}


def test_the_same_import_and_export_again_find_that_all_is_done(tmp_path):
    make(tmp_path / "hf", dense_model())
    (tmp_path / "run").mkdir()
    assert not imported(tmp_path / "hf", tmp_path / "run").before  # empty
    assert not exported(tmp_path / "run", tmp_path / "back").before
    before = contents(tmp_path)
    assert imported(tmp_path / "hf", tmp_path / "run").before
    assert exported(tmp_path / "run", tmp_path / "back").before
    assert contents(tmp_path) == before


def test_a_target_of_something_else_is_left_alone(tmp_path):
    make(tmp_path / "hf", dense_model())
    imported(tmp_path / "hf", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "back")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")

    def refused(attempt, source, target, why="", **options):
        before = contents(tmp_path)
        with pytest.raises(ConversionError, match=rf"{target}: axl convert \w+ expects a directory that does.*{why}"):
            attempt(tmp_path / source, tmp_path / target, **options)
        assert contents(tmp_path) == before

    for attempt, source in ((imported, "hf"), (exported, "run")):
        refused(attempt, source, "full")
    refused(exported, "run", "run")
    refused(imported, "hf", "run", "of another .made from .*/hf as it was, or with other options", dtype="bfloat16")
    refused(exported, "run", "back", "there is no model-00001-of", max_shard_size=2000)
    for name, spoilt in (("model.safetensors", b"\1"), ("config.json", b" ")):
        content = (tmp_path / "back" / name).read_bytes()
        (tmp_path / "back" / name).write_bytes(content[:-1] + spoilt)
        refused(exported, "run", "back", f"of another .*back/{name} differs")
        (tmp_path / "back" / name).write_bytes(content + b" ")
        refused(exported, "run", "back", f"of another .*back/{name} differs")
        (tmp_path / "back" / name).write_bytes(content)
    (tmp_path / "hf" / "config.json").touch()
    refused(imported, "hf", "run", "of another")


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    make(tmp_path / "hf", dense_model())
    imported(tmp_path / "hf", tmp_path / "run")
    chunk = next((tmp_path / "run/checkpoints/0/params/norm.scale").glob("c.*"))
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"norm/scale' does not match its checksum"):
        exported(tmp_path / "run", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize("attempt", [imported, exported])
def test_a_full_disk_leaves_nothing_behind(tmp_path, attempt, monkeypatch):
    make(tmp_path / "hf", dense_model())
    imported(tmp_path / "hf", tmp_path / "run")
    source = tmp_path / ("hf" if attempt is imported else "run")
    before = sorted(tmp_path.rglob("*"))
    free = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: free)
        with pytest.raises(ConversionError, match=r"new: no space left: expected [\d,]+ bytes free, got 1,000"):
            attempt(source, tmp_path / "new")

    def full(file, data, place):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(ConversionError, match=r"new: no space left on the device; .* Nothing is left"):
            attempt(source, tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == before
