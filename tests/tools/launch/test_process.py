"""A process of a launched run as its container starts it: rank, log, exit status, SIGTERM, the unpacked code."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from tools.launch import process, script
from tools.launch.launch import Launch

MODULE = [sys.executable, "-m", "tools.launch.process"]


def start(run_dir: Path, mode: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a process of a run."""
    command = [*MODULE, mode, "--name", "run-trainer", "--run-dir", str(run_dir), *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = {**own, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)


def given(**values: int) -> argparse.Namespace:
    return argparse.Namespace(**{"hosts": 4, "slices": 2, "chips": 0, **values})


def test_a_command_gets_its_rank_and_leaves_its_log_and_status(tmp_path: Path):
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = start(
        tmp_path,
        *("train", "--hosts", "4", "--slices", "2", "--meet", "first:8490", "--", sys.executable, "-c", code),
        JOB_COMPLETION_INDEX="3",
        AXL_SLICE="1",
        TPU_WORKER_ID="3",
        MEGASCALE_SLICE_ID="0",
    )
    output, _ = done.communicate(timeout=60)
    assert done.returncode == 3
    assert "this is process 7 by its index, and 3 by the platform's variables; 7 counts" in output
    log = tmp_path / "launch" / "logs" / "run-trainer-7.log"
    assert log.read_text() == "['--processes', '8', '--process', '7', '--meet', 'first:8490']\n"
    assert log.read_text() in output
    assert json.loads(log.with_suffix(".exit.json").read_text())["status"] == 3


@pytest.mark.parametrize(("status", "expected"), [(0, 143), (2, 2)])
def test_a_process_that_was_stopped_is_not_complete_though_its_command_saved_and_ended_with_0(
    status: int, expected: int, tmp_path: Path
):
    code = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit({status})))
print("ready", flush=True)
time.sleep(60)
"""
    running = start(tmp_path, "train", "--", sys.executable, "-c", code)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (expected, "saved\n")

    """Send it to another thread, which is what a signal just before the wait begins comes to."""
    """As one that comes just before the wait begins: here another thread gets it."""
    code = """
import os, pathlib, signal, sys, threading, time
from tools.launch.process import Stop, run_command

def strike():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=strike).start()
command = [sys.executable, "-c", "import time; time.sleep(60)"]
sys.exit(run_command(command, pathlib.Path(sys.argv[1]), os.environ, Stop()))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], timeout=30)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_machine_with_other_chips_is_worth_a_restart_and_no_user_error(tmp_path: Path):
    done = start(tmp_path, "train", "--chips", "4", "--", "true", JAX_PLATFORMS="")
    output, _ = done.communicate(timeout=60)
    assert (done.returncode, output) == (70, "axl: this machine shows 0 TPU chips; expected 4\n")
    assert not (tmp_path / "launch").exists()


@pytest.mark.parametrize("folder", ["", "vfio"])
def test_chips_are_counted_by_their_files(folder: str, tmp_path: Path):
    names = {"": ["accel0", "accel1", "accel12", "null", "7"], "vfio": ["0", "1", "2", "vfio"]}
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in names[folder]:
        (tmp_path / folder / name).touch()
    assert process.seen_chips(tmp_path) == 3


@pytest.mark.parametrize("index", ["4", "-1", "x"])
def test_an_index_beyond_the_slice_is_refused(index: str):
    with pytest.raises(process.Wrong, match="expected"):
        process.rank(given(), {"JOB_COMPLETION_INDEX": index})


def test_a_process_that_restarts_on_another_machine_takes_over_the_lock_that_it_left(tmp_path: Path):
    lock = tmp_path / "run.lock"

    def held_by(host: str) -> None:
        run = RunDirectory.open(tmp_path, "config")
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": host}))
        del run

    held_by("others")
    process.release_lock(tmp_path, "first")
    with pytest.raises(RunDirectoryError, match="in use by process .* on others"):
        RunDirectory.open(tmp_path, "config")
    lock.unlink()
    held_by("first")  # killed: nobody took it away
    process.release_lock(tmp_path, "second")
    RunDirectory.open(tmp_path, "config").close()


def test_the_script_unpacks_the_code_and_starts_the_process_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "CODE", str(tmp_path / "code"))
    (tmp_path / "marker").write_text("unpacked")
    with tarfile.open(tmp_path / "axl.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "marker", "marker")
    cfg = Launch.Config(experiment="demo", tpu="v6e:1x1", setup="touch installed")
    text = script.bootstrap(cfg, tmp_path / "axl.tar.gz")
    arguments = ["train", "--name", "x", "--run-dir", str(tmp_path), "--", "cat", "marker"]
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(process.__file__).parents[2]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(text: str) -> "subprocess.CompletedProcess[str]":
        command = ["/bin/bash", "-c", text, "axl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)

    done = run(text)
    assert (done.returncode, done.stdout) == (0, "unpacked"), done.stderr
    assert (tmp_path / "code" / "installed").exists()
    # pip ends with 2 where a package cannot be installed: no mistake of the experiment.
    assert (
        run(script.bootstrap(cfg.clone(setup="exit_2() { return 2; }; exit_2"), tmp_path / "axl.tar.gz")).returncode
        == 70
    )


@pytest.mark.full
def test_a_head_whose_ray_does_not_start_ends_and_so_does_its_command(tmp_path: Path):
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "POD_IP": "127.0.0.1"}
    head = start(tmp_path, "head", "--port", "16379", "--", "sleep", "1000", **path)  # of Ray's own
    output, _ = head.communicate(timeout=100)
    assert head.returncode == 70 and "ray start ended with status" in output, output
    log = tmp_path / "launch" / "logs" / "run-trainer-0.log"
    assert json.loads(log.with_suffix(".exit.json").read_text())["status"] == 143
    assert not process.ended_path(tmp_path).exists()


@pytest.mark.parametrize("status", [0, 2])
def test_a_head_that_has_lost_ray_restarts_whatever_its_command_returns(status: int, tmp_path: Path):
    """A driver whose Ray has died ends as if it was stopped, or blames the cluster: neither is the end of the run."""
    ray = tmp_path / "ray"
    ray.write_text(f"#!/bin/bash\nuntil [ -e {tmp_path / 'go'} ]; do sleep 0.02; done; exit 1\n")
    ray.chmod(0o755)
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))
pathlib.Path({str(tmp_path / "go")!r}).touch()
time.sleep(60)
"""
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_IP": "127.0.0.1"}
    head = start(tmp_path, "head", "--port", "1", "--", sys.executable, "-c", code, **path)
    output, _ = head.communicate(timeout=60)
    assert head.returncode == 70 and "ray start ended with status 1" in output, output
    assert not process.ended_path(tmp_path).exists()


@pytest.mark.full
def test_a_head_and_a_node_are_one_cluster_until_the_command_has_ended(tmp_path: Path):
    """Real Ray with a token: the command sees both nodes, the node ends with the run, and nothing is left."""
    port, token, host = 26379, "0" * 64, own_address()
    code = """
import ray, time
ray.init("auto", log_to_driver=False)
deadline = time.monotonic() + 90
while len([n for n in ray.nodes() if n["Alive"]]) < 2 and time.monotonic() < deadline:
    time.sleep(0.5)
print("nodes", len([n for n in ray.nodes() if n["Alive"]]), flush=True)
"""
    variables = {
        "POD_IP": host,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    node = start(tmp_path, "node", "--name", "run-worker", "--head", f"{host}:{port}", **variables)
    head = start(tmp_path, "head", "--port", str(port), "--", sys.executable, "-c", code, **variables)
    try:
        output, _ = head.communicate(timeout=200)
        joined = tmp_path / "launch" / "logs" / "run-worker-0.log"
        assert head.returncode == 0 and "nodes 2" in output, joined.read_text() if joined.exists() else output
        assert node.wait(timeout=60) == 0, node.stdout
        deadline = time.monotonic() + 30
        while (left := _raylets(port)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert left == []
    finally:
        for one in (head, node):
            one.kill()


def own_address() -> str:
    """Return this machine's address in its network: Ray joins no second node on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]


def _raylets(port: int) -> list[list[str]]:
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in found if any(f":{port}" in word for word in command)]
