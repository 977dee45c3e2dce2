"""Seconds from `axl convert import` of a model to the first token that `axl serve` answers, beside transformers.

Ours is what a user types: two processes of the command line, and one request over HTTP. The peer is one process that
loads the same files and calls `generate` for the same greedy token. Both begin with Python's imports, have the same
cores, and find packages and files in the page cache.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.decoder import Decoder
from axlearn_like.run.child_group import ChildGroup
from models.huggingface.architectures import config_json
from models.huggingface.convert import expected_tensors
from models.huggingface.tensor_files.found import SINGLE
from models.huggingface.tensor_files.safetensors import SafetensorsWriter
from models.qwen import qwen
from models.tiny import tiny
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.environments import Peer
from tools.bench.harness.interleave import peer_commands
from tools.bench.harness.processes import MeasurementFailed, run_command, worker_environ

BENCHMARK = "first_token"
MODEL, PROMPT = "Qwen2.5-0.5B", 16
_TOKENIZER = Path(__file__).parents[3] / "experiments" / "small_bpe"
_LIMITS = ("--set", "max_prompt=64", "--set", "max_new=8")
_TIMEOUT_S = 600.0
Figures = dict[str, Any]


def run(
    peers: Sequence[Peer], rounds: int, say: Callable[[str], None], *, link: bool = False, quick: bool = False
) -> dict[str, Any]:
    """Make a checkpoint of random bfloat16 numbers, and take turns.

    The first turn of ours is `cold`: no program of it is in the compilation cache, which begins empty. All others
    find those of the first, as every start of the same model but the first one does.

    Args:
        peers: peers to take turns with.
        rounds: turns of each, after the cold one.
        say: shows a line of progress.
        link: imports by `--link`.
        quick: a tiny model and one round.

    Returns:
        `ours` and each peer: medians of `cpu_s`, `wall_s`, and ours by part; `cold`: the same of the first turn;
        `ratio_cpu` and `ratio_wall` by peer: medians of the quotients within a round; `same_token`: all gave one.
    """
    cfg = tiny(vocab_size=2048) if quick else qwen(MODEL)
    commands, errors = peer_commands(BENCHMARK, peers, say)
    ours: list[Figures] = []
    theirs: dict[str, list[Figures]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="axl-bench-first-token-") as work:
        source, cache = Path(work) / "source", Path(work) / "programs"
        make_model(cfg, source)
        say("cold: no program is compiled")
        cold = _ours(source, Path(work) / "model", cache, link)
        for number in range(1 if quick else rounds):
            say(f"round {number + 1} of {rounds}")
            ours.append(_ours(source, Path(work) / "model", cache, link))
            for name in list(commands):
                try:
                    theirs[name].append(_theirs(commands[name].argv, commands[name].environ, source))
                except MeasurementFailed as error:
                    errors[name] = str(error)
                    say(f"left out: {name}: {error}")
                    del commands[name], theirs[name]
    tokens = {one["token"] for one in [cold, *ours, *(one for each in theirs.values() for one in each)]}
    return {
        "bench": BENCHMARK,
        "model": "tiny" if quick else MODEL,
        "linked": link,
        "errors": errors,
        "rounds": len(ours),
        "ours": _medians(ours),
        "cold": {name: value for name, value in cold.items() if name != "token"},
        **{name: _medians(each) for name, each in theirs.items()},
        **{f"ratio_{kind}": _ratios(ours, theirs, f"{kind}_s") for kind in ("cpu", "wall") if theirs},
        "same_token": len(tokens) == 1,
        "machine": machine(),
        **circumstances(),
    }


def make_model(cfg: Decoder.Config, folder: Path) -> None:
    """Write a directory in Hugging Face's form: random bfloat16 numbers of a usual size, and a small tokenizer."""
    folder.mkdir(parents=True)
    shutil.copytree(_TOKENIZER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "config.json").write_text(json.dumps(config_json(cfg, "bfloat16")))
    tensors = expected_tensors(cfg)
    noise = np.random.default_rng(0).normal(scale=0.02, size=1 << 22).astype(jnp.bfloat16)
    with SafetensorsWriter(folder / SINGLE, {name: ("BF16", one.shape) for name, one in tensors.items()}) as out:
        for name, one in tensors.items():
            numbers = np.resize(noise, one.shape)
            out.write(name, numbers if len(one.shape) > 1 else (1 + numbers).astype(jnp.bfloat16))


def _ours(source: Path, target: Path, cache: Path, link: bool) -> Figures:
    """Import, serve, and ask for one token; returns seconds and CPU seconds until it is here, and by part."""
    shutil.rmtree(target, ignore_errors=True)
    environ = worker_environ(AXL_COMPILATION_CACHE=str(cache), JAX_ENABLE_COMPILATION_CACHE="true")
    axl = [sys.executable, "-m", "axlearn_like"]
    began = time.perf_counter()
    import_ = [*axl, "convert", "import", str(source), str(target), *(("--link",) if link else ())]
    with subprocess.Popen(import_, env=environ, **_QUIET) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise MeasurementFailed(f"axl convert import ended with status {process.returncode}")
    imported, import_cpu = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
    command = [*axl, "serve", str(target), "--port", "0", *_LIMITS]
    with ChildGroup(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # serving 'model' (...) at http://127.0.0.1:PORT/v1
            if not line:
                raise MeasurementFailed("axl serve ended before it served")
            asked = time.perf_counter()
            token = _ask(line.rsplit(" at ", 1)[1].strip(), target.name)
            wall, serve_cpu = time.perf_counter() - began, _cpu_s(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_TIMEOUT_S)
    return {
        "cpu_s": import_cpu + serve_cpu,
        "wall_s": wall,
        "import_cpu_s": import_cpu,
        "import_s": imported,
        "serve_cpu_s": serve_cpu,
        "serve_s": wall - imported,
        "request_s": began + wall - asked,
        "token": token,
    }


_QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def _ask(url: str, model: str) -> int:
    """Return the most likely token after tokens 1, 2, ..."""
    body = {"model": model, "prompt": list(range(1, PROMPT + 1)), "max_tokens": 1, "temperature": 0}
    body |= {"return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"][0]
    except urllib.error.HTTPError as error:
        raise MeasurementFailed(f"the server refused: {error.read()[:300]!r}") from None


def _cpu_s(process: int) -> float:
    """Return the CPU seconds of a process that runs (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _theirs(argv: Sequence[str], environ: Any, source: Path) -> Figures:
    from tools.bench.harness.processes import Command

    began = time.perf_counter()
    found = run_command(Command((*argv, str(source), str(PROMPT)), environ))
    return {"cpu_s": found["cpu_s"], "wall_s": time.perf_counter() - began, "token": found["token"]}


def _medians(turns: Sequence[Figures]) -> Figures:
    return {name: round(statistics.median(turn[name] for turn in turns), 2) for name in turns[0] if name != "token"}


def _ratios(ours: Sequence[Figures], theirs: dict[str, list[Figures]], name: str) -> dict[str, float]:
    return {
        peer: round(statistics.median(our[name] / one[name] for our, one in zip(ours, each, strict=True)), 2)
        for peer, each in theirs.items()
    }
