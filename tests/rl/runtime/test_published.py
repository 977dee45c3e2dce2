"""A published run is made again from one file; what was changed in it is named, and what is no such file is refused."""

import dataclasses
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.checkpoint.reader import list_steps
from axlearn_like.checkpoint.versions import find_version
from axlearn_like.config import ConfigError, to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.audit import rollout_ledger as ledger
from rl.audit.rollout_ledger import LedgerRow, pack, read_ledger, unpack
from rl.runtime import published as module
from rl.runtime.published import PublishedRun, publish, read_published, redraw_some, remake
from tests.axlearn_like.tiny import ROOT
from tests.rl.runtime.ray.experiments import checksums, parameters, run_here
from tests.rl.tiny import make_group, make_prompt, tiny_experiment

pytestmark = pytest.mark.slow

KILLED = "tests.rl.runtime.ray.experiments:slow"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = tiny_experiment(num_steps=3, staleness=1)
    cfg.trainer.checkpoint.set(save_every=1, keep=4)
    return run_here(tmp_path_factory.mktemp("published") / "run", cfg)


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    publish(RunDirectory.attach(run), out := run.parent / "run.axlrun")
    return out


def changed(made: PublishedRun, update: int, index: int, **values: Any) -> PublishedRun:
    """Return the run with other values in one entry of an update."""
    data = bytearray(made.rows[update].data)
    group, place = divmod(index, 4)
    at = group * (ledger.GROUP.size + 4 * ledger.ROLLOUT.size) + ledger.GROUP.size
    at += place * ledger.ROLLOUT.size
    fields = list(ledger.ROLLOUT.unpack_from(data, at))
    for name, value in values.items():
        fields[("version", "tokens", "logprobs", "reward").index(name)] = value
    ledger.ROLLOUT.pack_into(data, at, *fields)
    rows = {**made.rows, update: made.rows[update]._replace(data=bytes(data))}
    return dataclasses.replace(made, rows=rows)


def test_a_run_is_made_again_to_the_bit_and_each_change_of_its_file_is_named(file: Path) -> None:
    made = read_published(file)
    lines: list[str] = []
    found = remake(made, made.experiment(), None, lines.append)
    assert (found.rollouts, found.versions, found.difference) == (48, 4, None)
    assert lines == [f"update {step} of 3: the same" for step in (1, 2, 3)]
    name = unpack(made.rows[1].data)[6].name
    for values, what in (
        ({"tokens": 5}, "tokens"),
        ({"logprobs": 5}, "log-probabilities"),
        ({"reward": 0.5}, "reward"),
    ):
        wrong = changed(made, 1, 6, **values)
        assert remake(wrong, made.experiment(), 1, lines.append).difference == f"update 1, {name}: {what}"
    wrong = dataclasses.replace(made, versions={**made.versions, 1: "0"})
    assert remake(wrong, made.experiment(), 1, lines.append).difference == "weights of version 1"


def test_some_rollouts_are_drawn_again_with_a_checkpoint_alone(file: Path, run: Path) -> None:
    made = read_published(file)
    weights = find_version(f"{run}@1")
    found = redraw_some(made, made.experiment(), weights, 9, seed=0)
    assert (found.rollouts, found.difference) == (9, None)
    wrong = made
    for index in range(16):
        wrong = changed(wrong, 3, index, tokens=1)
    found = redraw_some(wrong, made.experiment(), weights, 9, seed=0).difference
    assert found is not None and found.startswith("version 1, prompt ") and found.endswith(": tokens")
    with pytest.raises(
        UserError, match="version 3, by which no rollout was drawn; expected one of the versions 0 to 1"
    ):
        redraw_some(made, made.experiment(), find_version(f"{run}@3"), 9)


def test_files_that_are_none_are_refused(file: Path, tmp_path: Path) -> None:
    def refused(data: bytes) -> str:
        (path := tmp_path / "x.axlrun").write_bytes(data)
        with pytest.raises(UserError, match=r"x\.axlrun") as error:
            read_published(path)
        return str(error.value)

    def packed(content: bytes) -> bytes:
        return b"axl run 1\n" + hashlib.sha256(content).digest() + content

    whole = file.read_bytes()
    assert "no published run" in refused(b"") and "no published run" in refused(b"PK" + whole)
    for at in (20, 60, len(whole) - 1):
        assert "damaged" in refused(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "damaged" in refused(whole[:-7])
    parts = json.loads(lzma.decompress(whole[42:]))
    odd: tuple[Any, ...] = ([], {}, {**parts, "rows": []}, {**parts, "rows": [[1, "AAAA", []]]}, {**parts, "data": 3})
    for content in odd:
        assert "no published run: " in refused(packed(lzma.compress(json.dumps(content).encode())))
    assert "no published run" in refused(packed(b"no archive"))
    module.UNPACKED, before = 1000, module.UNPACKED
    try:
        assert "has more than 1,000 bytes when it is unpacked" in refused(packed(lzma.compress(b" " * 10**6)))
    finally:
        module.UNPACKED = before
    with pytest.raises(UserError, match="cannot be read"):
        read_published(tmp_path / "none")


def test_runs_that_nobody_can_repeat_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    def refused(cfg: Any, kind: type[Exception] = ConfigError, lines: list[dict[str, Any]] | None = None) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with RunDirectory.open(tmp_path / "run", to_text(cfg)) as opened:
            rows = [] if lines is None else lines
            (opened.path / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(kind) as error:
            publish(RunDirectory.attach(tmp_path / "run"), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(error.value)

    late = tiny_experiment(staleness=1)
    late.controller.set(weights="newest")
    assert "weights" in refused(late)
    cfg = tiny_experiment()
    assert "has no update yet" in refused(cfg, UserError)
    rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert "lacks update 2" in refused(cfg, UserError, [rows[0], rows[2]])
    assert "update 1 was made twice" in refused(cfg, UserError, [*rows, {**rows[1], "step": 1}])
    assert "no row of a ledger" in refused(cfg, UserError, [{**rows[0], "data": "?"}])
    with pytest.raises(UserError, match="no run directory"):
        publish(RunDirectory.attach(tmp_path), tmp_path / "out")
    made = publish(RunDirectory.attach(run), tmp_path / "out")
    with pytest.raises(UserError, match="the rows of task 'sums' are not those of the run: their checksum is None"):
        remake(dataclasses.replace(made, data={"sums": "12"}), made.experiment(), None, print)


def test_a_large_run_has_at_most_24_bytes_a_rollout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {
        step: LedgerRow(
            pack(
                make_group(
                    make_prompt(64 * step + n), rng.integers(0, 200, (8, 5)), rng.integers(0, 2, 8), version=step
                )
                for n in range(32)
            ),
            ("cpu",),
        )
        for step in range(1, 41)
    }
    made = PublishedRun(to_text(tiny_experiment()), {}, "", {step: f"{step:032x}" for step in range(41)}, rows)
    (path := tmp_path / "large").write_bytes(module.packed(made))
    assert read_published(path) == made
    rollouts = 40 * 32 * 8
    assert sum(len(row.data) for row in rows.values()) / rollouts < 22
    assert path.stat().st_size / rollouts < 24


def start(path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tools.cli", "rl", KILLED, "--run-dir", str(path), "--runtime", "inprocess"]
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, "--quiet"], cwd=ROOT, env=environ, **out)


@pytest.mark.full
def test_all_that_was_in_flight_survives_all_roles_by_checkpoint_and_ledger_alone(tmp_path: Path) -> None:
    """Kill -9 everything, delete all else, and resume: the trainer's state and the ledger are those of a whole run."""
    whole = start(tmp_path / "whole")
    assert whole.wait(300) == 0, whole.communicate()[0]
    process, saved = start(tmp_path / "parts"), tmp_path / "parts" / "checkpoints" / "rl"
    while len(read_ledger(tmp_path / "parts")) < 5 or not list_steps(saved):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done, at = len(read_ledger(tmp_path / "parts")), list_steps(saved)[-1]
    for path in (tmp_path / "parts").iterdir():
        if path.name not in ("checkpoints", "ledger.jsonl", "config.txt"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    began = time.monotonic()
    again = start(tmp_path / "parts")
    assert again.wait(300) == 0, again.communicate()[0]
    seconds = time.monotonic() - began
    assert parameters(tmp_path / "parts") == parameters(tmp_path / "whole")
    assert checksums(tmp_path / "parts") == checksums(tmp_path / "whole")
    ledgers = [read_ledger(tmp_path / name) for name in ("parts", "whole")]
    assert ledgers[0] == ledgers[1] and done >= at, "rollouts that were made again are the same"
    rollouts = sum(len(unpack(row.data)) for row in ledgers[0].values())
    nbytes = sum(len(row.data) for row in ledgers[0].values()) / rollouts
    on_disk = (tmp_path / "parts" / "ledger.jsonl").stat().st_size / (rollouts + 16 * (done - at))
    print(f"killed at update {done}, checkpoint {at}; {nbytes:.1f} bytes a rollout ({on_disk:.1f} as rows of JSON);")
    print(f"{done - at} updates made again and {12 - done} made, with start and compilation: {seconds:.1f} s")
    assert nbytes <= 24 and on_disk <= 64
