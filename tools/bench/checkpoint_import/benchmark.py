"""Import of a checkpoint in Hugging Face's form, by copies and by links, beside a plain read and a plain copy of it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.decoder import Decoder
from mesh.errors import UserError
from models.huggingface.architectures import config_json
from models.huggingface.convert import expected_tensors
from models.huggingface.tensor_files.found import INDEX, SINGLE
from models.huggingface.tensor_files.safetensors import SafetensorsWriter, shards
from models.llama import llama
from models.qwen import qwen
from models.tiny import tiny
from tools.bench.harness.circumstances import circumstances, machine

SIZES = {"0.6B": "Qwen3-0.6B", "3B": "Llama-3.2-3B", "8B": "Llama-3.1-8B"}
_SHARD = 5 * 10**9  # bytes of a file
_BUFFER = 8 << 20  # bytes of a read
_FORMS: dict[str, tuple[str, ...]] = {"copied": (), "linked": ("--link",)}  # options of the command


class Measured(NamedTuple):
    """One import.

    Attributes:
        seconds: from when its modules are loaded until everything is on the disk.
        process_s: from the start of the process to its end.
        cpu_s: CPU seconds of the process.
        peak_rss_gb: peak memory in GB of the process.
    """

    seconds: float
    process_s: float
    cpu_s: float
    peak_rss_gb: float


def run(
    size: str, rounds: int, say: Callable[[str], None], *, folder: Path | None, quick: bool = False
) -> dict[str, Any]:
    """Make a checkpoint of random bfloat16 numbers, and take turns: a plain read of its files, a copy, each import.

    Before each turn the files are dropped from the page cache. Each import is a process of its own, as `axl convert
    import` is; its seconds begin when its modules are loaded and end when everything is on the disk.

    Args:
        size: key of `SIZES`.
        rounds: turns of each.
        say: shows a line of progress.
        folder: on the disk that is meant; None: that of temporary files.
        quick: a tiny model and one round.

    Returns:
        Medians: `raw_read_mb_s`, `raw_copy_mb_s`, and of the import that copies `import_mb_s`, `ratio_to_raw_read` and
        `ratio_to_raw_copy`; the highest `peak_rss_gb`, of the whole process. In `linked` those of `axl convert import
        --link`.
    """
    cfg = _model("tiny" if quick else size)
    result: dict[str, Any] = {"bench": "import", "model": "tiny" if quick else SIZES[size], "errors": {}}
    reads: list[float] = []
    copies: list[float] = []
    imports: dict[str, list[Measured]] = {form: [] for form in _FORMS}
    with tempfile.TemporaryDirectory(prefix="axl-bench-import-", dir=folder) as work:
        files = make_checkpoint(cfg, Path(work) / "source")
        nbytes = sum(file.stat().st_size for file in files)
        say(f"{nbytes / 1e9:.2f} GB of {result['model']} in {len(files)} file(s)")
        for number in range(1 if quick else rounds):
            say(f"round {number + 1} of {rounds}")
            drop_from_cache(files)
            reads.append(seconds_to_read(files))
            drop_from_cache(files)
            copies.append(seconds_to_copy(files, Path(work) / "copy"))
            for form, options in _FORMS.items():
                drop_from_cache(files)
                imports[form].append(measured_import(Path(work) / "source", Path(work) / "target", options))
                subprocess.run(["rm", "-rf", str(Path(work) / "target")], check=True)
    return {
        **result,
        "bytes": nbytes,
        "rounds": len(reads),
        "raw_read_mb_s": round(nbytes / statistics.median(reads) / 1e6, 1),
        "raw_copy_mb_s": round(nbytes / statistics.median(copies) / 1e6, 1),
        **_figures(nbytes, reads, imports["copied"]),
        "ratio_to_raw_copy": _ratio(copies, imports["copied"]),
        "linked": _figures(nbytes, reads, imports["linked"]),
        "machine": machine(),
        **circumstances(("axlearn-like", "numpy", "tensorstore", "orbax-checkpoint")),
    }


def _figures(nbytes: int, reads: list[float], imports: list[Measured]) -> dict[str, Any]:
    """Return the figures of one form of import beside the reads of the same rounds."""
    seconds = statistics.median(one.seconds for one in imports)
    return {
        "import_mb_s": round(nbytes / seconds / 1e6, 1),
        "ratio_to_raw_read": _ratio(reads, imports),
        "ratios": [round(read / one.seconds, 3) for read, one in zip(reads, imports, strict=True)],
        "peak_rss_gb": round(max(one.peak_rss_gb for one in imports), 3),
        "import_cpu_s": round(statistics.median(one.cpu_s for one in imports), 2),
        "process_s": round(statistics.median(one.process_s for one in imports), 2),
    }


def _ratio(plain: list[float], imports: list[Measured]) -> float:
    """Return how fast imports are beside a plain read, or copy, of the same files; medians of both."""
    return round(statistics.median(plain) / statistics.median(one.seconds for one in imports), 3)


def _model(size: str) -> Decoder.Config:
    if size == "tiny":
        return tiny(vocab_size=272)
    name = SIZES[size]
    return llama(name) if name.startswith("Llama") else qwen(name)


def make_checkpoint(cfg: Decoder.Config, folder: Path) -> list[Path]:
    """Write a directory of random bfloat16 numbers in that model's tensors; returns the files with tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(cfg, "bfloat16")))
    tensors = expected_tensors(cfg)
    sizes = {name: 2 * int(np.prod(tensor.shape)) for name, tensor in tensors.items()}
    if (free := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize) < 2 * sum(sizes.values()):
        raise UserError(
            f"{folder}: expected {2 * sum(sizes.values()):,} bytes free, got {free:,}; choose a smaller --size"
        )
    groups = list(shards(sizes, _SHARD))
    noise = np.random.default_rng(0).integers(0, 1 << 16, 1 << 24, np.uint16)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        with SafetensorsWriter(folder / file, {name: ("BF16", tensors[name].shape) for name in names}) as out:
            for name in names:
                numbers = np.resize(noise, sizes[name] // 2).view(jnp.bfloat16)
                out.write(name, numbers.reshape(tensors[name].shape))
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("*.safetensors"))


def drop_from_cache(files: list[Path]) -> None:
    """Ask the operating system to forget the files' content, where there is a way to ask."""
    for path in files if hasattr(os, "posix_fadvise") else []:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_read(files: list[Path]) -> float:
    """Return the seconds to read the files from front to back into one buffer."""
    buffer, began = bytearray(_BUFFER), time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def seconds_to_copy(files: list[Path], folder: Path) -> float:
    """Return the seconds to copy the files, by the operating system, until the copies are on the disk; removes them."""
    folder.mkdir()
    began = time.perf_counter()
    for path in files:
        shutil.copyfile(path, folder / path.name)
        with open(folder / path.name, "rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def measured_import(source: Path, target: Path, options: tuple[str, ...] = ()) -> Measured:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "axlearn_like", "convert", "import", str(source), str(target), *options, "--json"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the import ended with exit status {process.returncode}")
    kilobytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return Measured(
        seconds=json.loads(said.splitlines()[-1])["seconds"],
        process_s=time.perf_counter() - began,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_rss_gb=kilobytes * 1024 / 1e9,
    )
