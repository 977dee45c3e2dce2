"""Submission to a cluster of Kubernetes by our client, against an API server with faults by script."""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh import UserError
from tests.tools.launch.kubernetes.fake import JOBSETS, FakeCluster
from tools.launch.bundle import Bundle
from tools.launch.control.handle import LaunchedRun
from tools.launch.control.status import verdict
from tools.launch.control.submit import submit
from tools.launch.kubernetes.client import Client
from tools.launch.kubernetes.cluster import KubernetesCluster
from tools.launch.kubernetes.kubeconfig import find_access
from tools.launch.launch import Kubernetes, Launch
from tools.launch.machines.capacity import Capacity
from tools.launch.plan import LaunchPlan, Role

CORE = "/api/v1/namespaces/lab"
OF_JOBSETS = f"{JOBSETS}/namespaces/lab/jobsets"
CFG = Launch.Config(
    experiment="demo",
    devices="v6e:1x1",
    workers=1,
    worker_devices="v6e:1x1",
    kubernetes=Kubernetes.Config(namespace="lab"),
)
ON_DEMAND, SPOT = Capacity("on-demand"), Capacity("spot")
ROLES = (Role("head", 1, ON_DEMAND), *(Role(n, 1, SPOT, CFG.slices_of("worker")) for n in ("trainer", "worker")))
PLAN = LaunchPlan("demo", "rl", CFG, (), "trainer=v6e:1x1,workers=1 x v6e:1x1", ROLES, (), 0.0)
BUNDLE = Bundle("1" * 16, bytes(range(256)) * 3000, "")
NAMES = ["demo-head", "demo-trainer", "demo-worker-0"]


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    found = FakeCluster()
    found.put(f"{CORE}/serviceaccounts", {"metadata": {"name": "axl-run"}})
    found.put(f"{CORE}/persistentvolumeclaims", {"metadata": {"name": "axl"}})
    yield found
    found.close()


class Session:
    """A client of the fake, which does not sleep."""

    def __init__(self, fake: FakeCluster, path: Path, user: Any = None, cfg: Launch.Config = CFG):
        self.fake, self.slept = fake, list[float]()
        access = find_access({"KUBECONFIG": str(fake.kubeconfig(path / "config", user))})
        client = Client(access, sleep=self.slept.append)
        self.cfg, self.api = cfg, KubernetesCluster(client, "lab", cfg, PLAN, sleep=self.slept.append)
        self.run = LaunchedRun("demo", self.api)

    def submit(self) -> None:
        submit(self.api, self.cfg, PLAN, {"launch.txt": "text"}, BUNDLE, lambda line: None)

    def made(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.fake.objects if path.startswith(OF_JOBSETS))

    def left(self) -> list[str]:
        """Return what is there beside what was before."""
        ours = ("/jobsets/", "/jobs/", "/configmaps/", "/secrets/")
        return sorted(path for path in self.fake.objects if any(kind in path for kind in ours))


@pytest.fixture
def session(fake: FakeCluster, tmp_path: Path) -> Session:
    return Session(fake, tmp_path)


@pytest.mark.slow
def test_a_run_is_submitted_looked_at_and_stopped_and_nothing_of_it_stays(session: Session):
    session.submit()
    assert session.made() == NAMES
    assert session.left()[:2] == [f"{CORE}/configmaps/demo-launch", f"{CORE}/secrets/demo-token"]
    assert session.api.launch_text("demo") == "text"
    token = base64.b64decode(session.fake.objects[f"{CORE}/secrets/demo-token"]["data"]["ray"]).decode()
    assert len(token) == 64
    others = {path: one for path, one in session.fake.objects.items() if "secrets" not in path}
    assert token not in json.dumps(others), "only the Secret has the token"
    with pytest.raises(UserError, match="demo is active: demo-head, .*`axl launch stop` ends it"):
        session.submit()
    session.run.stop(lambda line: None)
    assert session.left() == []
    with pytest.raises(UserError, match="there is nothing of a run 'demo'"):
        session.run.stop()


def test_the_code_travels_in_parts_and_the_job_joins_them(session: Session):
    kept: list[Any] = []
    answer = session.fake.answer

    def watch(method: str, target: str, body: Any, authorization: str | None) -> Any:
        if method == "POST":
            kept.append(body)
        return answer(method, target, body, authorization)

    session.fake.answer = watch  # pyright: ignore[reportAttributeAccessIssue]
    session.submit()
    parts = [one for one in kept if "binaryData" in one]
    (job,) = [one for one in kept if one["kind"] == "Job"]
    assert b"".join(base64.b64decode(data) for one in parts for data in one["binaryData"].values()) == BUNDLE.content
    assert len(parts) == 2 and all(len(json.dumps(one)) < 1_000_000 for one in parts)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "rm -f /axl/demo/launch/ended.json" in container["command"][2]
    assert f"/axl/bundles/{BUNDLE.file_name}" in container["command"][2]


@pytest.mark.slow
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_submission_that_is_refused_half_way_leaves_nothing(refused: int, session: Session):
    session.fake.faults = [(f"POST {OF_JOBSETS}$", 201, {}, "")] * 0
    answer, count = session.fake.answer, iter(range(9))

    def refuse(method: str, target: str, body: Any, authorization: str | None) -> Any:
        if method == "POST" and target == OF_JOBSETS and next(count) == refused:
            causes = [{"field": "spec.replicatedJobs[0].template", "message": "Invalid value"}]
            return 422, {}, {"message": "invalid", "details": {"causes": causes}}
        return answer(method, target, body, authorization)

    session.fake.answer = refuse  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"422: spec.replicatedJobs\[0\].template: Invalid value"):
        session.submit()
    assert session.left() == []


@pytest.mark.slow
def test_stop_removes_what_a_submission_that_was_killed_at_any_moment_has_left(session: Session):
    answer, states = session.fake.answer, list[dict[str, Any]]()

    def watch(method: str, target: str, body: Any, authorization: str | None) -> Any:
        found = answer(method, target, body, authorization)
        states.append(dict(session.fake.objects))
        return found

    session.fake.answer = watch  # pyright: ignore[reportAttributeAccessIssue]
    session.submit()
    session.fake.answer = answer  # pyright: ignore[reportAttributeAccessIssue]
    left = dict[tuple[str, ...], dict[str, Any]]()
    for state in states:
        session.fake.objects = state
        left[tuple(session.left())] = state
    assert len(left) == 10, "nothing; parts of the code, the Job, its end; config, token, and each JobSet"
    for paths, state in left.items():
        session.fake.objects = dict(state)
        if paths:
            session.run.stop(lambda line: None)
        assert session.left() == [], paths


def test_a_busy_server_is_asked_again_and_a_closed_connection_is_opened_again(session: Session):
    session.fake.faults = [
        ("GET .*/jobsets$", 429, {"Retry-After": "7"}, "too many requests"),
        ("GET .*/jobsets$", 503, {}, "leader changes"),
        ("GET .*/serviceaccounts/axl-run$", 0, {}, "closed in the middle"),
    ]
    session.submit()
    assert session.slept[:2] == [7.0, 1.0] and session.made() == NAMES
    session.fake.faults = [("GET .*/pods$", 500, {}, "no")] * 6
    with pytest.raises(UserError, match="500: no"):
        session.run.status()


def test_a_list_whose_next_page_is_gone_is_read_again(session: Session):
    session.submit()
    first = session.fake.answer
    answers = iter([None, (410, {}, {"message": "Expired"})])

    def gone(method: str, target: str, body: Any, authorization: str | None) -> Any:
        scripted = next(answers, None) if "/jobsets?" in target else None
        return scripted or first(method, target, body, authorization)

    session.fake.answer = gone  # pyright: ignore[reportAttributeAccessIssue]
    assert [one["metadata"]["name"] for one in session.api.jobsets("demo")] == NAMES


BEFORE = {
    "no JobSet": (lambda fake: setattr(fake, "has_jobset", False), "fake has no JobSet .*how it is installed"),
    "no rights": (lambda fake: fake.denied.add("secrets"), "does not permit you in namespace lab: create secrets"),
    "no account": (
        lambda fake: fake.objects.pop(f"{CORE}/serviceaccounts/axl-run"),
        "namespace lab of fake has no service account axl-run: kubectl create serviceaccount axl-run -n lab",
    ),
    "no claim": (lambda fake: fake.objects.pop(f"{CORE}/persistentvolumeclaims/axl"), "has no claim axl: make one"),
    "storage": (lambda fake: setattr(fake, "carried", "Failed"), "storage of the run cannot be written.*BackoffLimit"),
    "expired": (lambda fake: setattr(fake, "token", "new"), r"does not accept the credentials \(expired\?\).*log in"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_it_is_refused_before_anything_is_created(case: str, session: Session):
    change, message = BEFORE[case]
    change(session.fake)
    with pytest.raises(UserError, match=message):
        session.submit()
    assert session.left() == []


def test_a_program_that_makes_tokens_is_asked_again_when_one_has_expired(fake: FakeCluster, tmp_path: Path):
    made = tmp_path / "made"
    made.write_text("old")
    code = f"import json; print(json.dumps({{'status': {{'token': open({str(made)!r}).read()}}}}))"
    program = {"exec": {"command": sys.executable, "args": ["-c", code], "apiVersion": "v1beta1"}}
    session = Session(fake, tmp_path, program)
    assert session.api._client.access.token() == "old"
    made.write_text("good")
    assert session.run.status() == []
    with pytest.raises(UserError, match=r"no-such-plugin, which is not installed. Install it so"):
        missing = {"exec": {"command": "no-such-plugin", "installHint": "Install it so\n"}}
        Session(fake, tmp_path, missing).run.status()
    with pytest.raises(UserError, match="log in again"):
        Session(fake, tmp_path, {"exec": {"command": "false"}}).run.status()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no credentials for a cluster: there is no .*get-credentials"),
        (lambda text: "{}", "no current context with a cluster and a user"),
        (lambda text: text.replace("http://127.0.0.1", "http://10.0.0.1"), "is not encrypted; expected https"),
        (lambda text: text.replace("token: good", "auth-provider: {}"), "has an auth-provider"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(change: Any, message: str, fake: FakeCluster, tmp_path: Path):
    path = tmp_path / "config"
    if change is not None:
        fake.kubeconfig(path)
        path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message):
        find_access({"KUBECONFIG": str(path)})


def test_a_cluster_that_does_not_answer_is_named(fake: FakeCluster, session: Session):
    fake.close()
    with pytest.raises(UserError, match="fake does not answer at http://127.0.0.1"):
        session.submit()


def pod(name: str, jobset: str, attempt: int = 0, **status: Any) -> dict[str, Any]:
    labels = {
        "axl/run": "demo",
        "jobset.sigs.k8s.io/jobset-name": jobset,
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
    }
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def ended(code: int, at: str) -> list[dict[str, Any]]:
    return [{"state": {"terminated": {"exitCode": code, "finishedAt": at}}}]


def unscheduled(message: str) -> dict[str, Any]:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [scheduled]}


def test_the_status_says_in_one_line_why_nothing_runs(session: Session):
    session.submit()
    fake, head = session.fake, session.fake.objects[f"{OF_JOBSETS}/demo-head"]

    def line() -> str:
        return verdict(session.run.status())

    message = "0/12 nodes are available: 12 node(s) didn't match Pod's node affinity/selector"
    fake.put(f"{CORE}/pods", pod("demo-head-node-0-0-x", "demo-head", phase="Running"))
    for name in ("demo-trainer", "demo-worker-0"):
        fake.put(f"{CORE}/pods", pod(f"{name}-node-0-0-x", name, **unscheduled(message)))
    assert line() == f"1 of 3 run; demo-trainer: pending: capacity: {message}"
    waiting = [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}}]
    fake.put(f"{CORE}/pods", pod("demo-trainer-node-0-0-x", "demo-trainer", phase="Pending", containerStatuses=waiting))
    assert line().endswith("demo-trainer: pending: image: ImagePullBackOff: manifest unknown")
    quota = 'pods "demo-trainer-node-0-0" is forbidden: exceeded quota: tpus'
    event = {"involvedObject": {"name": "demo-trainer-node-0"}, "type": "Warning", "reason": "FailedCreate"}
    fake.put(f"{CORE}/events", {"metadata": {"name": "e"}, "message": quota, **event})
    assert line().endswith(f"demo-trainer: pending: quota: {quota}")
    head["metadata"]["uid"] = "7"
    head["spec"]["suspend"] = True
    fake.objects.pop(f"{CORE}/pods/demo-head-node-0-0-x")
    flavors = "couldn't assign flavors to pod set node: insufficient unused quota for google.com/tpu"
    workload = {
        "metadata": {"name": "w", "ownerReferences": [{"uid": "7"}]},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": flavors}]},
    }
    fake.put("/apis/kueue.x-k8s.io/v1beta2/namespaces/lab/workloads", workload)
    assert line() == f"0 of 3 run; demo-head: suspended: queue: {flavors}"


def test_a_crash_is_that_of_the_process_which_failed_first_in_the_last_attempt(session: Session):
    session.submit()
    trainer = session.fake.objects[f"{OF_JOBSETS}/demo-trainer"]
    trainer["status"] = {"terminalState": "Failed", "restarts": 3, "conditions": [{"type": "Failed", "reason": "R"}]}
    for name, attempt, at in (("a", 2, "09:00"), ("b", 3, "10:02"), ("c", 3, "10:01")):
        found = pod(name, "demo-trainer", attempt, phase="Failed", containerStatuses=ended(1, at))
        session.fake.put(f"{CORE}/pods", found)
    session.fake.logs["c"] = "Traceback\n  deep\n\nMemoryError: 95 GiB\n"
    said = "demo-trainer: failed, 3 restarts: c ended with status 1: deep | MemoryError: 95 GiB"
    assert verdict(session.run.status()) == said
    assert session.run.logs("trainer") == {}
    assert session.run.logs("c", 1) == {"c": "MemoryError: 95 GiB"}
