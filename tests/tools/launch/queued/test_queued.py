"""Queued resources against a fake of their API with states by script, and the startup script on a fake machine."""

import json
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from mesh import UserError
from tests.golden.launch.manifests import CASES
from tools.launch.control.handle import LaunchedRun
from tools.launch.control.status import verdict
from tools.launch.kubernetes.client import Client
from tools.launch.kubernetes.kubeconfig import Access
from tools.launch.plan import LaunchPlan, Role
from tools.launch.queued.cluster import GoogleAccess, QueuedResources
from tools.launch.queued.keeper import Keeper
from tools.launch.queued.request import parent, queued_resource, startup_script

CFG = CASES["llama2_7b.queued"]
ROLE = Role("trainer", 1, CFG.terms("trainer"), CFG.slices_of("trainer"))
PLAN = LaunchPlan("llama2-7b", "train", CFG, (), None, (ROLE,), (), 0.0)
ARCHIVE = ("axl-" + "1" * 16 + ".tar.gz", b"code")


class FakeApi:
    """A queued resource keeps its name until it is deleted; its states follow a script, one with each look."""

    def __init__(self) -> None:
        self.there, self.scripts = False, list[list[str]]()  # a script for each time that it is asked for
        self.asked: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.refuse: tuple[int, str] | None = None
        self.states: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version, wbufsize = "HTTP/1.1", 1 << 16

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                status, found = outer.answer(self.command, self.path, self.rfile.read(length))
                if self.headers["Authorization"] != "Bearer good":
                    status, found = 401, {"message": "Unauthorized"}
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(target)
        query = {name: value[0] for name, value in parse_qs(parts.query).items()}
        if parts.path.startswith("/upload/"):
            if query["name"] in self.objects:
                return 412, {}
            self.objects[query["name"]] = body
            return 200, {}
        if method == "POST":
            if self.refuse is not None:
                return self.refuse[0], {"message": self.refuse[1]}
            if self.there:
                return 409, {"message": "already exists"}
            assert query["queuedResourceId"] == "llama2-7b"
            self.asked.append(json.loads(body))
            self.there, self.states = True, self.scripts.pop(0)
            return 200, {"name": "operation", "done": True}
        if not self.there:
            return 404, {"message": "not found"}
        if method == "DELETE":
            assert query == {"force": "true"}
            self.there = False
            return 200, {}
        state, _, why = (self.states[0] if len(self.states) == 1 else self.states.pop(0)).partition(":")
        if state == "gone":  # by its own machine, when the run has ended
            self.there = False
            return 404, {"message": "not found"}
        data = {f"{state.lower()}Data": {"error": {"message": why}}} if why else {}
        return 200, {**self.asked[-1], "name": "x", "state": {"state": state, **data}}


class Session:
    def __init__(self, api: FakeApi) -> None:
        self.api, self.said, self.slept = api, list[str](), list[float]()
        client = Client(Access(api.address, None, {"token": "good"}, "the Cloud TPU API"), sleep=self.slept.append)
        self.resources = QueuedResources(client, parent(CFG), self.said.append, api.address)
        self.keeper = Keeper(client, parent(CFG), "llama2-7b", self.said.append, self.slept.append)
        self.resources.keeper = lambda run: self.keeper  # which does not sleep
        self.run = LaunchedRun("llama2-7b", self.resources)


@pytest.fixture
def session() -> Iterator[Session]:
    api = FakeApi()
    yield Session(api)
    api.close()


def test_one_that_is_lost_is_deleted_and_asked_for_again_under_its_name_until_the_run_has_ended(session: Session):
    session.api.scripts = [
        ["WAITING_FOR_RESOURCES", "PROVISIONING", "FAILED:no capacity in us-east5-a"],
        ["PROVISIONING", "FAILED:internal"],
        ["PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED"],
        ["ACTIVE", "gone"],
    ]
    request = queued_resource(CFG, PLAN, "1" * 16)
    session.keeper.create(request)
    session.keeper.keep(request)
    assert session.api.asked == [request] * 4
    assert [line for line in session.said if "again" not in line] == [
        "llama2-7b: WAITING_FOR_RESOURCES: no capacity yet",
        "llama2-7b: PROVISIONING",
        "llama2-7b: FAILED: no capacity in us-east5-a",
        "llama2-7b: PROVISIONING",
        "llama2-7b: FAILED: internal",
        "llama2-7b: PROVISIONING",
        "llama2-7b: ACTIVE",
        "llama2-7b: SUSPENDING",
        "llama2-7b: SUSPENDED",
        "llama2-7b: ACTIVE",
        "llama2-7b: absent",
    ]
    pauses = [line.rpartition(" in ")[2] for line in session.said if "again" in line]
    assert pauses == ["15 s", "30 s", "15 s"], "longer and longer, until it was active"


def test_a_run_is_submitted_its_state_said_and_ended(session: Session):
    session.api.scripts = [["WAITING_FOR_RESOURCES"]]
    session.resources.submit(CFG, PLAN, ARCHIVE)
    assert session.api.objects == {f"runs/bundles/{ARCHIVE[0]}": b"code"}
    line = "0 of 1 run; llama2-7b: pending: WAITING_FOR_RESOURCES: no capacity yet"
    assert verdict(session.run.status()) == line
    with pytest.raises(UserError, match="is WAITING_FOR_RESOURCES; `axl launch stop` ends it"):
        session.resources.submit(CFG, PLAN, ARCHIVE)
    session.api.states = ["SUSPENDED:preempted"]
    assert verdict(session.run.status()) == "llama2-7b: failed: SUSPENDED preempted"
    session.api.scripts = [["ACTIVE"]]
    session.resources.submit(CFG, PLAN, ARCHIVE)  # in place of the lost one
    assert verdict(session.run.status()) == "1 of 1 run"
    session.run.stop(lambda line: None)
    assert not session.api.there
    with pytest.raises(UserError, match="there is nothing of a run"):
        session.run.stop()


def test_a_resource_of_somebody_else_is_never_deleted(session: Session):
    """Even one that has the name of the run, and was suspended."""
    session.api.scripts = [["ACTIVE", "SUSPENDED"]]
    session.resources.submit(CFG, PLAN, ARCHIVE)
    session.api.asked[-1]["tpu"]["nodeSpec"][0]["node"]["labels"]["axl-run"] = "other"
    session.api.states = ["SUSPENDED"]
    for again in (session.run.stop, lambda: session.resources.submit(CFG, PLAN, ARCHIVE)):
        with pytest.raises(UserError, match="llama2-7b has no label axl-run=llama2-7b: it was not asked for by"):
            again()
    session.api.asked[-1]["tpu"] = {"nodeSpec": [{}]}
    with pytest.raises(UserError, match="left alone; --name gives your run another name"):
        session.keeper.keep({})
    assert session.api.there and len(session.api.asked) == 1


@pytest.mark.parametrize(
    ("status", "said", "message"),
    [
        (429, "Quota exceeded for TPUV5sPodPerProjectPerZone", "quota: .*429: Quota exceeded for"),
        (403, "tpu.nodes.create", "does not permit POST .*tpu.nodes.create"),
        (400, "no such topology", "400: no such topology"),
    ],
)
def test_a_refusal_leaves_nothing(status: int, said: str, message: str, session: Session):
    session.api.refuse = (status, said)
    with pytest.raises(UserError, match=message):
        session.resources.submit(CFG, PLAN, ARCHIVE)
    assert not session.api.there and session.run.status() == []


def test_a_request_says_slices_terms_and_machines():
    request = queued_resource(CFG, PLAN, "1" * 16)
    (spec,) = request["tpu"]["nodeSpec"]
    assert spec["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": "llama2-7b"}
    assert spec["node"]["acceleratorConfig"] == {"type": "V5P", "topology": "4x4x4"}
    assert request["spot"] == {} and request["queueingPolicy"] == {"validUntilDuration": "43200s"}
    reserved = CFG.clone(capacity="reserved:ours", slices=1)
    role = Role("trainer", 1, reserved.terms("trainer"), reserved.slices_of("trainer"))
    plan = LaunchPlan("llama2-7b", "train", reserved, (), None, (role,), (), 0.0)
    request = queued_resource(reserved, plan, "")
    assert request["reservationName"] == "projects/mine/locations/us-east5-a/reservations/ours"
    assert request["tpu"]["nodeSpec"][0]["nodeId"] == "llama2-7b"


MACHINE = {
    "curl": """case "${@: -1}" in
  */agent-worker-number) echo 3 ;;
  */worker-network-endpoints) echo "${ENDPOINTS:-a:b:10.0.0.7,c:d:10.0.0.8}" ;;
  */tpu-env) printf "%s" "$TPU_ENV" ;;
esac""",
    "mountpoint": "exit 1",
    "gcsfuse": 'echo "gcsfuse $*" >> "$SAID"',
    "gcloud": 'echo "gcloud $*" >> "$SAID"',
    "sleep": "",
    "docker": """[ "$1" = run ] || exit 0
for word in "$@"; do case "$word" in JOB_COMPLETION_INDEX=*|AXL_SLICE=*|*:8490) echo "$word" >> "$SAID" ;; esac; done
code=$(head -1 "$CODES"); sed -i 1d "$CODES"; exit $code""",
}


@pytest.mark.parametrize(
    ("variables", "codes", "expected"),
    [
        ("", [1, 75, 0], ["JOB_COMPLETION_INDEX=3", "AXL_SLICE=0", "10.0.0.7:8490"]),
        ("", [125] * 30, ["JOB_COMPLETION_INDEX=3", "AXL_SLICE=0", "10.0.0.7:8490"]),
        ("", [*[125] * 29, 1, *[127] * 29, 0], ["JOB_COMPLETION_INDEX=3", "AXL_SLICE=0", "10.0.0.7:8490"]),
        ("ENDPOINTS: of names", [0], ["JOB_COMPLETION_INDEX=3", "AXL_SLICE=0", "10.0.0.7:8490"]),
        (
            "ACCELERATOR_TYPE: 'v5p-128'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'\n",
            [2],
            ["JOB_COMPLETION_INDEX=3", "AXL_SLICE=1", "10.0.0.1:8490"],
        ),
    ],
)
def test_the_startup_script_finds_its_place_and_starts_again_what_is_worth_it(
    variables: str, codes: list[int], expected: list[str], tmp_path: Path
):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in MACHINE.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755 | stat.S_IXUSR)
    script = startup_script(CFG, PLAN, "1" * 16).replace("/axl", f"{tmp_path}/axl")
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    said = tmp_path / "said"
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "TPU_ENV": variables,
        "SAID": str(said),
        "CODES": str(tmp_path / "codes"),
        **({"ENDPOINTS": "10.0.0.7,10.0.0.8"} if variables.startswith("ENDPOINTS") else {}),
    }
    done = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or "MEGASCALE" in variables, done.stderr
    lines = said.read_text().splitlines()
    assert lines[0].startswith("gcsfuse") and lines[0].endswith(f"bucket {tmp_path}/axl")
    assert lines[1:] == expected * len(codes), "only worker 0 of slice 0 deletes the resource"
    assert (tmp_path / "codes").read_text() == ""


def test_the_first_machine_deletes_the_resource_when_the_run_has_ended(tmp_path: Path):
    assert "gcloud compute tpus queued-resources delete llama2-7b --force" in startup_script(CFG, PLAN, "")
    script = startup_script(CFG, PLAN, "").splitlines()
    assert script[-1].startswith('[ "$INDEX$SLICE" != 00 ] || gcloud')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": "tpu7x:2x2x1", "slices": 1}, "the Cloud TPU API does not sell tpu7x"),
        ({"storage": "pvc:axl"}, "storage: expected gs://BUCKET/FOLDER with --on queued-resource"),
        ({"capacity": "flex"}, "has no such capacity"),
        ({"secret_env": {"KEY": "a/b"}}, "no Secrets are there"),
        ({"tpu_api": CFG.tpu_api.clone(project=None)}, "project: expected the name of a project"),
    ],
)
def test_what_the_api_has_no_word_for_is_refused(change: dict[str, Any], message: str):
    cfg = CFG.clone(**change)
    role = Role("trainer", 1, cfg.terms("trainer"), cfg.slices_of("trainer"))
    with pytest.raises(UserError, match=message):
        queued_resource(cfg, LaunchPlan("llama2-7b", "train", cfg, (), None, (role,), (), 0.0), "")


def test_without_credentials_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no credentials for Google Cloud: `gcloud auth login`"):
        GoogleAccess(environment={"GCE_METADATA_HOST": "127.0.0.1:9"}).token()
