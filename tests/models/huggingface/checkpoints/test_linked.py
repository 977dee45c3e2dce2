"""Linked import: the parameters of the import that copies, from files that have a second name."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import ConfigError, to_text
from models.huggingface import hf, hf_weights
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.linked import LinkedParams, link_checkpoint
from models.huggingface.convert import abstract_params, by_name
from models.huggingface.rows import ConversionError
from models.huggingface.tensor_files import file_digests
from tests.models.huggingface.checkpoints.made import dense_model, make, mixture_model
from tools.cli import main

ROOT = Path(__file__).parents[4]


def linked(source, target, **options):
    return link_checkpoint(HuggingFaceDirectory.open(source), target, **options)


def axl(*words):
    assert main(["convert", *map(str, words)]) == 0


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def symbolic(folder):
    """Move the files away, and leave symbolic links to them, as caches of the Hub have them."""
    blobs = folder.parents[1] / "blobs"
    folder.rename(blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)


CASES = {
    "tied, float16, from the Hub's cache": (lambda: dense_model(tied=True), {"dtype": "F16"}, symbolic),
    "mixture, two files, float32 norms": (mixture_model, {"files": 2, "scale": "F32"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_all_is_as_from_an_import_that_copies_when_the_source_is_gone(tmp_path, case):
    model, options, moved = CASES[case]
    source = tmp_path / "hub" / "snapshots" / "hf"
    source.parent.mkdir(parents=True)
    make(source, model(), **options)
    if moved is not None:
        moved(source)
    axl("import", source, tmp_path / "copied")
    axl("import", source, tmp_path / "linked", "--link")
    for folder in tmp_path.glob("*"):
        if folder.name not in ("copied", "linked"):
            shutil.rmtree(folder)
    first, second = (
        to_text(hf(tmp_path / form).clone(start_from=StartFrom.Config(path=""))) for form in ("copied", "linked")
    )
    assert first == second
    wanted = by_name(restore_params(tmp_path / "copied"))
    found = by_name(hf_weights(tmp_path / "linked").build().params(abstract_params(model())))
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(np.asarray(array), wanted[name].astype(np.float32), err_msg=name)
    for form in ("copied", "linked"):
        axl("export", tmp_path / form, tmp_path / f"from-{form}", "--max-shard-size", "3KB")
    assert contents(tmp_path / "from-linked") == contents(tmp_path / "from-copied")
    axl("import", tmp_path / "linked", tmp_path / "again")  # a copy of its own
    for name, array in by_name(restore_params(tmp_path / "again")).items():
        np.testing.assert_array_equal(array, wanted[name])
    assert not list(tmp_path.glob(".*"))


def overwrite(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_file_that_is_changed_in_place_is_noticed_by_readers_of_that_part(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "BLOCK", 1024)
    make(tmp_path / "hf", dense_model())
    linked(tmp_path / "hf", tmp_path / "run")
    file = tmp_path / "hf" / "model.safetensors"
    size = file.stat().st_size
    overwrite(file, size - 1)  # of the last tensor by name
    source = HuggingFaceDirectory.open(tmp_path / "run")
    last = max(source.tensors.values(), key=lambda one: one.start)
    params = LinkedParams(source)
    params.entry("embedding/weight_vd", (), (0, 1))
    changed = rf"huggingface/model\.safetensors: bytes {(size - 1) // 1024 * 1024:,} to {size:,} are not those"
    with pytest.raises(ConversionError, match=changed):
        last.map()
    with pytest.raises(ConversionError, match=changed):
        hf_weights(tmp_path / "run").build().params(abstract_params(dense_model()))
    with pytest.raises(ConversionError, match=changed):
        linked(tmp_path / "run", tmp_path / "again")
    assert main(["convert", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_a_file_that_is_replaced_is_kept_and_one_that_is_cut_off_or_has_another_header_is_refused(tmp_path):
    make(tmp_path / "hf", dense_model())
    linked(tmp_path / "hf", tmp_path / "run")
    start = hf_weights(tmp_path / "run").build()
    wanted = abstract_params(dense_model())
    file, kept = tmp_path / "hf" / "model.safetensors", tmp_path / "run/huggingface/model.safetensors"
    shutil.copy(file, tmp_path / "new")
    overwrite(tmp_path / "new", 5000)
    os.replace(tmp_path / "new", file)
    start.check(wanted)
    original = kept.read_bytes()
    header = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])
    name = next(name for name in header if name != "__metadata__")
    kept.write_bytes(original.replace(name.encode(), name.encode()[::-1]))  # the same length
    with pytest.raises(ConversionError, match=r"bytes 0 to [\d,]+ are not those that were imported"):
        start.check(wanted)
    kept.write_bytes(original[:-1])
    with pytest.raises(ConversionError, match=rf"expected {len(original):,} bytes, as when it was imported, got"):
        start.check(wanted)
    kept.unlink()
    with pytest.raises(ConversionError, match=r"model\.safetensors: cannot be read \(No such file"):
        start.check(wanted)
    (tmp_path / "run" / "linked.json").write_text('{"model.safetensors": 3}')
    with pytest.raises(ConversionError, match=r"linked\.json: cannot be read"):
        start.check(wanted)
    kept.write_bytes(original)
    (tmp_path / "run" / "linked.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"model\.safetensors: this file is not one of those that were imported"):
        start.check(wanted)


def test_another_file_system_is_refused_with_the_way_out(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system in /dev/shm")
    make(tmp_path / "hf", dense_model())
    target = other / f"axl-test-{os.getpid()}" / "run"
    try:
        with pytest.raises(ConversionError, match=r"run: .*safetensors: it is on another file system.*without --link"):
            linked(tmp_path / "hf", target)
        assert not list(target.parent.iterdir())
    finally:
        shutil.rmtree(target.parent, ignore_errors=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from models.huggingface.tensor_files import file_digests
from models.huggingface.checkpoints.directory import HuggingFaceDirectory
from models.huggingface.checkpoints.linked import link_checkpoint

file_digests.BLOCK = 1024

def kill(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

link_checkpoint(HuggingFaceDirectory.open(sys.argv[1]), Path(sys.argv[2]), progress=kill)
"""


@pytest.mark.full
def test_after_kill_9_nothing_has_the_name_and_the_same_command_does_all(tmp_path):
    make(tmp_path / "hf", mixture_model(), files=2)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "hf"), str(tmp_path / "run")]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert not (tmp_path / "run").exists() and list(tmp_path.glob(".run.*"))
    linked(tmp_path / "hf", tmp_path / "run")
    assert not list(tmp_path.glob(".*")) and len(HuggingFaceDirectory.open(tmp_path / "run").tensors) > 20


def test_what_links_cannot_do_is_refused(tmp_path, capsys):
    make(tmp_path / "hf", dense_model())
    command = ["convert", "import", str(tmp_path / "hf"), str(tmp_path / "run"), "--link"]
    assert main([*command, "--dtype", "float32"]) == 2
    assert "--dtype needs an import that copies" in capsys.readouterr().err
    assert main([*command, "--adapter", str(tmp_path)]) == 2
    assert "--adapter needs an import that copies" in capsys.readouterr().err
    assert main(command) == 0
    with pytest.raises(ConfigError, match=r"StartFrom\.path: .* linked import, use models\.huggingface\.hf_weights"):
        StartFrom.Config(path=str(tmp_path / "run")).build()
    assert jnp.dtype(hf(tmp_path / "run").dtype) == jnp.bfloat16
