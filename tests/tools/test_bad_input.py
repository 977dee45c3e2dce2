"""Mistakes that a user can make with `axl rl`: one message that names the thing, status 2, and no run is harmed."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.runtime.ray import preflight
from rl.runtime.run import RLRun
from tests.rl.runtime.ray.experiments import short
from tests.rl.tiny import tiny_experiment
from tests.tools.test_cli import run_and_list_modules
from tools import cli

TINY = "tests.rl.tiny:tiny_experiment"
OTHERS = "tests.rl.runtime.ray.experiments"


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would choose a number of devices, which only the first to use JAX in a process can."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two updates, with checkpoints of both."""
    path = tmp_path_factory.mktemp("finished") / "run"
    RLRun(short().build(), say=lambda line: None).run(path, runtime="inprocess")
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Every file below, with its bytes; the lock is let go of and taken, so it is left out."""
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != "run.lock"}


def refusal(capsys: pytest.CaptureFixture[str], run_dir: Path | str, *arguments: str, experiment: str = TINY) -> str:
    """The message with which `axl rl` refuses, having done nothing else and named at most the run directory."""
    assert cli.main(["rl", experiment, "--run-dir", str(run_dir), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out in ("", f"run directory: {run_dir}\n")
    message, prefix = printed.err.rstrip("\n"), "axl: error: "
    assert message.startswith(prefix) and "Traceback" not in message
    return message.removeprefix(prefix)


SETS = {
    "field": (["nmu_steps=3"], "'nmu_steps'.* did you mean 'num_steps'"),
    "nested field": (["trainer.mehs={}"], "'mehs'.* did you mean 'mesh'"),
    "type": (["num_steps=many"], "num_steps.*expected int, got 'many'"),
    "not an edit": (["num_steps"], "'num_steps': expected path=value"),
    "family": (["tasks.families.1.name=chain_sums"], "unknown task family 'chain_sums'; did you mean 'chain_sum'"),
    "parameter": (
        ["tasks.families.1.params={'min_trems': 2}"],
        "'chain_sum' has no param 'min_trems'; did you mean 'min_terms'",
    ),
    "its value": (["tasks.families.1.params={'min_terms': 0}"], "'chain_sum': reasoning-gym refuses .*min_terms"),
    "mesh size": (["trainer.mesh={'fsdp': 3}"], r"mesh fsdp 3 needs 3 devices but there are \d .*; fsdp \d would fit"),
    "mesh axis": (["trainer.mesh={'fdsp': 1}"], "mesh has no axis 'fdsp'; did you mean 'fsdp'"),
    "slices": (["trainer.slices={'dat': 2}"], "slices has no axis 'dat'; did you mean 'data'"),
    "positions": (
        ["policy.block.attention.rope.max_length=16"],
        r"max_prompt_tokens \+ max_new_tokens is \d+, but policy\.block\.attention\.rope\.max_length is 16",
    ),
    "rows": (
        ["trainer.row_multiple=3", "trainer.microbatches=2"],
        "row_multiple: expected a multiple of .* = 2, got 3",
    ),
    "prompt": (
        ["max_prompt_tokens=3"],
        r"of \d+ problems of family '\w+', \d+ have more than max_prompt_tokens=3 prompt tokens",
    ),
    "sampler": (["sampler.top_k=5"], "sampler: expected the whole distribution .*top_k=None"),
    "staleness": (["staleness=5"], "parameter_server.keep: expected 7 or more with staleness=5, got 4"),
    "leases": (["groups_per_lease=3"], "groups_per_lease: expected a divisor of prompts_per_step=4, got 3"),
    "samples": (["samples_per_prompt=2"], r"samples_per_prompt: expected 4 or more, for pass@4 .*got 2"),
    "an earlier name": (["max_new=9"], r"\w+: max_new is now max_new_tokens"),
    "updates": (["num_steps=0"], "num_steps: expected 1 or more, got 0"),
    "workers": (["workers=0"], "workers: expected 1 or more, got 0"),
}


@pytest.mark.parametrize(("edits", "message"), SETS.values(), ids=SETS)
def test_a_wrong_edit_is_refused_before_anything_is_made(
    edits: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word for edit in edits for word in ("--set", edit)]
    assert re.search(message, refusal(capsys, tmp_path / "run", *arguments))
    assert list(tmp_path.iterdir()) == []


def test_the_warm_start_has_a_mesh_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, tmp_path / "run", "--set", "warm_start.mesh={'data': 3}", experiment=f"{OTHERS}:warmed")
    assert said.startswith("mesh data 3 needs 3 devices but there are ")
    assert list(tmp_path.iterdir()) == []


def test_a_verifier_without_processes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, tmp_path / "run", "--set", "verifier.processes=0", experiment=f"{OTHERS}:slow")
    assert said.startswith("slow.verifier.processes: expected 1 or more, got 0")


def test_an_unknown_experiment_is_refused_without_importing_jax_or_ray(checkout: Path) -> None:
    status, modules = run_and_list_modules("from tools.cli import main\nstatus = main(['rl', 'dmeo'])", checkout)
    assert status == 2
    assert not modules & {"jax", "ray"}


def test_an_unknown_experiment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, tmp_path / "run", experiment="dmeo")
    assert said.startswith("no experiment 'dmeo'; did you mean 'demo'")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "run", Path("/proc/run")):
        assert refusal(capsys, path).startswith(f"cannot make run directory {path}: ")
    assert refusal(capsys, tmp_path / "file").startswith(f"run directory {tmp_path / 'file'} is a file; ")
    assert contents(tmp_path) == {str(tmp_path / "file"): b"mine"}


@pytest.mark.slow
def test_the_run_directory_of_another_config_is_refused_and_kept(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    said = refusal(capsys, finished, "--set", "max_new_tokens=5", experiment=f"{OTHERS}:short")
    assert f"run directory {finished} holds a run of another config" in said
    assert "\n  -max_new_tokens: 6\n  +max_new_tokens: 5\nTake another directory" in said
    assert contents(finished) == before


def test_a_run_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.open(tmp_path / "run", to_text(tiny_experiment())):
        before = contents(tmp_path)
        assert f"run directory {tmp_path / 'run'} is in use by process " in refusal(capsys, tmp_path / "run")
        assert contents(tmp_path) == before


@pytest.fixture
def damaged(request: pytest.FixtureRequest, finished: Path) -> Iterator[Path]:
    """A file of the newest checkpoint, with a bit turned or its end cut off; whole again afterwards."""
    item, harm = request.param
    folder = finished / "checkpoints" / "rl" / "2" / item
    path = max(folder.glob("**/d/*"), key=lambda p: p.stat().st_size)
    good = path.read_bytes()
    middle = len(good) // 2
    bad = good[:middle] + bytes([good[middle] ^ 16]) + good[middle + 1 :] if harm == "flipped" else good[:middle]
    path.write_bytes(bad)
    yield path
    path.write_bytes(good)


ITEMS = [
    pytest.param((item, harm), id=f"{item}-{harm}", marks=[pytest.mark.full] if harm == "cut" else [])
    for item in ("params", "rest")
    for harm in ("flipped", "cut")
]


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ITEMS, indirect=True)
def test_a_corrupt_checkpoint_is_named_with_the_nearest_good_one(
    damaged: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    said = refusal(capsys, finished, "--runtime", "inprocess", experiment=f"{OTHERS}:short")
    newest = finished / "checkpoints" / "rl" / "2"
    assert said.startswith(f"checkpoint {newest} is damaged (")
    assert said.endswith(f"the nearest older good step is 1. Move {newest} away to go on from there")
    assert contents(finished) == before


def test_too_little_memory_for_ray_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(preflight.MEMORY_VARIABLE, "100000")
    said = refusal(capsys, tmp_path / "run")
    assert re.match(r"not enough free memory to start Ray with 2 .*: [\d.]+ GiB available, 100000.0 GiB needed", said)
    assert "--runtime inprocess" in said
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(preflight.MEMORY_VARIABLE, "much")
    assert "AXL_RAY_MEMORY_GIB='much': expected a number of GiB" in refusal(capsys, tmp_path / "run")


def test_the_memory_needed_grows_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(preflight.MEMORY_VARIABLE, raising=False)
    enough = preflight.needed_memory(2)
    preflight.check_memory(2, enough)
    for workers, available in ((2, enough - 1), (3, enough)):
        with pytest.raises(UserError, match=f"with {workers} rollout workers"):
            preflight.check_memory(workers, available)


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(capsys, tmp_path / "run", "--set", f"parameter_server.port={port}")
    assert said.startswith(f"parameter server cannot listen on 127.0.0.1:{port} (parameter_server.host, ")
    assert said.endswith("set parameter_server.port=0 for any free port")
    said = refusal(capsys, tmp_path / "run", "--set", "parameter_server.port=70000")
    assert "cannot listen on 127.0.0.1:70000" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [("train", "demo_sft"), ("rl", "demo")])
def test_a_plugin_of_jax_that_cannot_be_used_is_one_message(command: tuple[str, ...], tmp_path: Path) -> None:
    """The plugin raises while jax asks it, as that for GPUs does without their driver."""
    plugin = tmp_path / "jax_plugins" / "broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("def initialize():\n    raise RuntimeError('there is no driver')\n")
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", *command, "--run-dir", str(tmp_path / "run")],
        env={**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.rstrip().rpartition("\n")[2]
    assert done.returncode == 2 and last.startswith("axl: error: jax cannot open the devices of this machine: "), last
    assert "there is no driver" in done.stderr and not (tmp_path / "run").exists()
