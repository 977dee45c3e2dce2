"""JobSets of trivial commands, carried out on this machine: indexes, addresses, paths, failures, grace, orphans."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import to_text
from mesh import UserError
from tools import cli
from tools.launch.control import submit
from tools.launch.control.api import exit_status
from tools.launch.control.handle import launch
from tools.launch.control.status import JobSetStatus, status_of, verdict
from tools.launch.launch import Launch
from tools.launch.local.client import LocalCluster
from tools.launch.local.cluster import mark_of, temporary_of
from tools.launch.local.pod import marked


def manifest(
    name: str, script: str, *, replicas: int = 1, pods: int = 1, grace: int = 5, **more: Any
) -> dict[str, Any]:
    """Return a JobSet as `axl launch` writes it, with another command."""
    container = {
        "name": "main",
        "image": "any",
        "command": ["/bin/bash", "-c", script],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "AXL_SLICE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}},
            },
            *more.pop("env", ()),
        ],
        "volumeMounts": [{"name": "runs", "mountPath": "/axl"}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": [
            {"name": "runs", "hostPath": {"path": str(more.pop("storage")), "type": "DirectoryOrCreate"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]},
        "template": {"metadata": {"labels": {"axl/run": "run", "axl/role": name.removeprefix("run-")}}, "spec": pod},
    }
    rule = {"name": "usersMistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "metadata": {"name": name, "namespace": "lab", "labels": {"axl/run": "run", "axl/role": name}},
        "spec": {
            "failurePolicy": {"maxRestarts": more.pop("restarts", 3), "rules": [rule]},
            "replicatedJobs": [{"name": "node", "replicas": replicas, "template": {"spec": job}}],
        },
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    found = LocalCluster(tmp_path / "run")
    yield found
    for one in found.jobsets("run"):
        found.delete(one["metadata"]["name"])
    until(lambda: not found.alive)
    assert not list(marked(mark(found)))


def mark(cluster: LocalCluster) -> str:
    return f"{mark_of(cluster.folder)}/"


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Return what a condition returns when it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def ended(cluster: LocalCluster) -> bool:
    return all(one["status"].get("terminalState") for one in cluster.jobsets("run")) and not cluster.alive


@pytest.mark.slow
def test_processes_have_index_address_paths_and_secrets_and_only_that(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_SHELL_HAS", "this")
    script = """
echo "$AXL_SLICE $JOB_COMPLETION_INDEX $POD_IP first-node-0-1.first.lab.svc:8490 first-node-1-0.first $TOKEN" > \
  /axl/said-$AXL_SLICE-$JOB_COMPLETION_INDEX
mkdir -p /opt/axl; echo $AXL_SLICE > /opt/axl/mine; echo $AXL_SLICE > /dev/shm/mine; echo "${MY_SHELL_HAS:-clean}"
"""
    env = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "run-token", "key": "ray"}}}]
    one = manifest("first", script, replicas=2, pods=2, env=env, storage=tmp_path / "runs")
    with pytest.raises(UserError, match=r"secrets that are not there: TOKEN \(Secret run-token\)"):
        cluster.create(one)
    assert not cluster.alive and not cluster.jobsets("run")
    cluster.make_secret("run-token", {"ray": "hidden"})
    assert (cluster.folder / "secrets.json").stat().st_mode & 0o777 == 0o600
    cluster.create(one)
    until(lambda: ended(cluster))
    said = {path.name: path.read_text().split() for path in sorted((tmp_path / "runs").iterdir())}
    assert list(said) == ["said-0-0", "said-0-1", "said-1-0", "said-1-1"]
    addresses = {name: words[2] for name, words in said.items()}
    assert len(set(addresses.values())) == 4 and all(one.startswith("127.") for one in addresses.values())
    for name, (part, index, _, meeting, other, token) in said.items():
        assert name == f"said-{part}-{index}" and token == "hidden"
        assert (meeting, other) == (f"{addresses['said-0-1']}:8490", addresses["said-1-0"])
    pods = cluster.pods("run")
    assert [cluster.log(pod["metadata"]["name"], 5) for pod in pods] == ["clean"] * 4
    for folder in ("opt/axl", "dev/shm"):
        assert (cluster.folder / "roots" / "first-node-1-0" / folder / "mine").read_text() == "1\n"
    assert "hidden" not in (cluster.folder / "status.json").read_text() + (cluster.folder / "cluster.log").read_text()
    assert {one.state for one in status_of(cluster, "run")} == {"completed"}
    with pytest.raises(UserError, match="JobSet first exists"):
        cluster.create(one)


def test_what_fails_the_same_way_three_times_ends_its_jobset_with_its_last_lines(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The others are restarted as ever."""
    process = f"cd {Path(__file__).parents[4]}; exec python -m tools.launch.process train --run-dir /axl/run --name"
    fails, other = (
        f"{process} fails -- bash -c 'echo no such data; exit 3'",
        f"{process} o -- bash -c 'echo $RANDOM$$; exit 3'",
    )
    cluster.create(manifest("fails", fails, storage=tmp_path / "runs", restarts=100))
    cluster.create(manifest("other", other, storage=tmp_path / "runs", restarts=3))
    until(lambda: ended(cluster), 60)
    found = {one.name: one for one in status_of(cluster, "run")}
    assert (found["fails"].state, found["fails"].restarts) == ("failed", 2)
    assert "status 2: no such data | axl: failed 3 times in the same way, with status 3" in found["fails"].why
    assert (found["other"].state, found["other"].restarts) == ("failed", 3) and "status 3" in found["other"].why


@pytest.mark.slow
def test_a_killed_process_restarts_its_jobset_alone_and_status_2_fails_it(cluster: LocalCluster, tmp_path: Path):
    storage = tmp_path / "runs"
    wait = "until [ -e /axl/go ]; do sleep 0.02; done"
    cluster.create(manifest("steady", wait, storage=storage))
    cluster.create(manifest("killed", f"sleep 60 & {wait}", pods=2, storage=storage))
    before = {pod["metadata"]["name"]: int(pod["metadata"]["annotations"]["axl/pid"]) for pod in cluster.pods("run")}
    victim = next(name for name in before if name.startswith("killed-node-0-0"))
    os.kill(before[victim], signal.SIGKILL)
    until(lambda: [one["status"]["restarts"] for one in cluster.jobsets("run")] == [0, 1])
    until(lambda: sum(one.running for one in status_of(cluster, "run")) == 3)
    now = {pod["metadata"]["name"]: exit_status(pod) for pod in cluster.pods("run")}
    assert now[victim] == 137 and sum(status is None for status in now.values()) == 3
    steady = next(name for name in before if name.startswith("steady"))
    assert now[steady] is None, "the other JobSet was left alone"
    assert len(list(marked(mark(cluster)))) >= 3
    cluster.create(manifest("wrong", "echo no such field; exit 2", storage=storage))
    until(lambda: any(one.state == "failed" for one in status_of(cluster, "run")))
    assert verdict(status_of(cluster, "run")).startswith("wrong: failed: wrong-node-0-0-")
    assert verdict(status_of(cluster, "run")).endswith("ended with status 2: no such field")
    (storage / "go").touch()
    until(lambda: ended(cluster))
    assert not list(marked(mark(cluster))), "what a process started ends with it"


@pytest.mark.slow
def test_the_limit_of_restarts_and_the_grace(cluster: LocalCluster, tmp_path: Path):
    cluster.create(manifest("again", "exit 1", restarts=1, storage=tmp_path))
    until(lambda: ended(cluster))
    (again,) = cluster.jobsets("run")
    assert again["status"]["restarts"] == 1
    assert again["status"]["conditions"][0]["reason"] == "ReachedMaxRestarts"
    cluster.delete("again")
    polite = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.02; done"
    cluster.create(manifest("polite", polite, storage=tmp_path))
    cluster.create(
        manifest("deaf", "trap '' TERM; echo ready; while :; do sleep 0.02; done", grace=1, storage=tmp_path)
    )
    names = [pod["metadata"]["name"] for pod in cluster.pods("run")]
    until(lambda: all(cluster.log(name, 1) == "ready" for name in names if "again" not in name))
    began = time.monotonic()
    cluster.delete("polite")
    assert time.monotonic() - began < 0.9
    cluster.delete("deaf")
    assert time.monotonic() - began > 0.9
    assert any("saved" in cluster.log(name, 2) for name in names if name.startswith("polite"))


def test_what_a_killed_cluster_leaves_is_ended_by_the_next_and_by_stop(cluster: LocalCluster, tmp_path: Path):
    cluster.create(manifest("long", "sleep 60 & sleep 60", storage=tmp_path))
    pid = json.loads((cluster.folder / "status.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not cluster.alive)
    left = set(marked(mark(cluster)))
    assert left
    (temporary_of(cluster.folder) / "socket").touch()
    (lost,) = status_of(cluster, "run")
    assert lost.state == "lost" and "its cluster was killed" in lost.line()
    cluster.create(manifest("other", "sleep 60", storage=tmp_path))  # starts the next, which carries on both
    assert not left & set(marked(mark(cluster)))
    assert len(cluster.jobsets("run")) == 2
    assert [path.name for path in temporary_of(cluster.folder).iterdir()] == [], "the former one's file is gone"
    os.kill(json.loads((cluster.folder / "status.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: not cluster.alive)
    for name in ("long", "other"):
        cluster.delete(name)
        assert name not in [one["metadata"]["name"] for one in cluster.jobsets("run")], "a new one is not taken for it"
    cluster.clean("run")
    assert not list(marked(mark(cluster))) and not (cluster.folder / "status.json").exists()
    assert not temporary_of(cluster.folder).exists() and not (cluster.folder / "roots").exists()


def test_a_folder_that_came_from_elsewhere_writes_reads_and_runs_nothing(tmp_path: Path):
    """Links in the place of lock and logs, names that are paths, JobSets and files that nobody has submitted."""
    secret, cluster = tmp_path / "secret.json", LocalCluster(tmp_path / "run")
    secret.write_text("mine")
    cluster.folder.mkdir(parents=True)
    (cluster.folder / "lock").symlink_to(secret)
    with pytest.raises(UserError, match="lock cannot be a lock"):
        status_of(cluster, "run")
    (cluster.folder / "lock").unlink()
    (cluster.folder / "lock").touch()
    named: dict[str, Any] = {"metadata": {"name": "../../../secret", "labels": {}}, "status": {}}
    for text in (
        json.dumps({"jobsets": [named]}),
        json.dumps({"pods": [named], "jobsets": []}),
        "[]",
        "{",
        "[" * 100_000,
    ):
        (cluster.folder / "status.json").write_text(text)
        with pytest.raises(UserError, match="status.json: "):
            submit.stop(cluster, "run", print)
    assert secret.read_text() == "mine"
    (cluster.folder / "logs").mkdir()
    (cluster.folder / "logs" / "pod.log").symlink_to(secret)
    assert cluster.log("pod", 5) == ""
    planted = manifest("planted", f"touch {tmp_path}/hit", storage=tmp_path)
    (cluster.folder / "wanted").mkdir()
    (cluster.folder / "wanted" / "planted.json").write_text(json.dumps({"manifest": planted}))
    (cluster.folder / "roots" / "mine-node-0-0" / "opt" / "axl").mkdir(parents=True)
    (cluster.folder / "roots" / "mine-node-0-0" / "opt" / "axl" / "sitecustomize.py").touch()
    (cluster.folder / "secrets.json").write_text('{"run-token": {"ray": "known to another"}}')
    cluster.place("run", {}, None)
    cluster.make_secret("run-token", {"ray": "new"})
    cluster.create(manifest("mine", "ls /opt/axl; echo ended", storage=tmp_path))
    until(lambda: ended(cluster))
    assert [one["metadata"]["name"] for one in cluster.jobsets("run")] == ["mine"] and not (tmp_path / "hit").exists()
    assert "sitecustomize" not in cluster.log(cluster.pods("run")[0]["metadata"]["name"], 5)
    assert "known to another" not in (cluster.folder / "secrets.json").read_text()


def test_words_of_a_process_do_not_steer_the_terminal():
    found = JobSetStatus("a", "trainer", "failed", "x\x1b[2J\x1b]0;title\x07\r\nend\x9b", 0, 0)
    assert found.line() == "a: failed: x]0;titleend"


def test_the_commands_show_a_run_and_end_it(cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cluster.create(
        manifest(
            "run-trainer",
            "echo 'train: step 1 of 9'; echo 'train: step 2 of 9, 7 s left'; echo bye; exec sleep 60",
            storage=tmp_path,
        )
    )
    until(lambda: "bye" in "".join(cluster.log(pod["metadata"]["name"], 1) for pod in cluster.pods("run")))
    where = str(cluster.run_dir)
    assert cli.main(["launch", "status", where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["verdict"], found["roles"][0]["state"]) == ("run", "1 of 1 run", "running")
    assert found["progress"] == "train: step 2 of 9, 7 s left"
    assert cli.main(["launch", "logs", where, "--role", "trainer", "--lines", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("==> run-trainer-node-0-0-") and shown.endswith("<==\nbye\n")
    assert cli.main(["launch", "logs", where, "--role", "worker"]) == 2
    assert "has no process of 'worker'" in capsys.readouterr().err
    assert cli.main(["launch", "add-worker", where]) == 2
    assert "no submission is kept" in capsys.readouterr().err
    submitted = Launch.Config(command=("models", "list"), on="local", storage=f"dir:{tmp_path}", name="run")
    cluster.place("run", {"launch.txt": to_text(submitted)}, None)
    assert cli.main(["launch", "add-worker", where]) == 2
    assert "run is no RL run, and has no workers" in capsys.readouterr().err
    assert cli.main(["launch", "stop", where]) == 0
    assert "stopped: run-trainer" in capsys.readouterr().out
    assert cli.main(["launch", "stop", where]) == 2
    assert "there is nothing of a run 'run'" in capsys.readouterr().err


@pytest.mark.slow
def test_any_command_is_carried_out_with_paths_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The rendered JobSet runs, from the unpacked code, in the storage; a mistake in it fails the run."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "$(touch hit) `touch hit`'s\nrüns~*"  # any name of a folder is one
    folder.mkdir()
    rows = [json.dumps({"prompt": f"question {number}"}) for number in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    split = ["--", "data", "split", "rows.jsonl", "--every", "2", "--train", "train.jsonl", "--test", "test.jsonl"]
    assert cli.main(["launch", "--on", "local", "--storage", f"dir:{folder}", "--wait", *split]) == 0
    shown = capsys.readouterr().out
    assert "axl data split rows.jsonl" in shown and shown.splitlines()[-1] == "completed"
    parts = [(folder / name).read_text().splitlines() for name in ("train.jsonl", "test.jsonl")]
    assert sorted(parts[0] + parts[1]) == sorted(rows)
    log = folder / "data-split" / "launch" / "logs" / "data-split-command-0.exit.json"
    assert json.loads(log.read_text())["status"] == 0
    split[3] = "none.jsonl"
    assert cli.main(["launch", "--on", "local", "--storage", f"dir:{folder}", "--wait", *split]) == 1
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("data-split-command: failed") and "status 2" in shown and "none.jsonl" in shown
    assert list(tmp_path.iterdir()) == [folder], "nothing in its name ran"


@pytest.mark.full
def test_an_evaluation_is_carried_out(tmp_path: Path):
    words = ("eval", "demo", "--random-weights", "--problems", "2", "--samples", "2")
    run = launch(Launch.Config(command=words, on="local", devices="v6e:1x1", storage=f"dir:{tmp_path}"))
    assert [one.state for one in run.wait(300)] == ["completed"], run.logs()
    result = json.loads((tmp_path / "runs" / "eval" / "demo" / "result.json").read_text())
    assert result["samples"] == 12, "two answers to two problems of each of three tasks"


def test_the_stored_submission_is_the_one_that_was_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The head's port, which is chosen at submission, must be that of workers which are added later."""
    seen: list[Any] = []
    monkeypatch.setattr(submit, "submit", lambda api, cfg, plan, files, bundle, say: seen.extend([cfg, files]))
    storage = f"dir:{tmp_path}"
    storage = f"dir:{tmp_path}"
    given = Launch.Config(
        experiment="demo_sft", on="local", devices="v6e:1x1", storage=storage, bundle=False, image="i"
    )
    launch(given)
    assert given.port == 6379 != seen[0].port and f"port: {seen[0].port}\n" in seen[1]["launch.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, slow", [("tools.launch.local.cluster", "jax"), ("rl.rollout.config", "jax.experimental.pallas")]
)
def test_what_starts_often_does_not_wait_for_what_it_does_not_use(module: str, slow: str):
    code = f"import sys, {module}; print({slow!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
