"""Requests of `axl launch` to a cluster and to the Cloud TPU API: a golden file, which the official clients confirm.

    python -m tests.golden.launch.sent

`tests/golden/launch/clients.py` sends the same by the official clients, where those are installed, and compares.
"""

import json
from pathlib import Path
from typing import Any

from tests.golden.launch.manifests import CASES
from tools.launch.bundle import Bundle
from tools.launch.control import submit as submission
from tools.launch.control.handle import LaunchedRun
from tools.launch.kubernetes.client import Client
from tools.launch.kubernetes.cluster import KubernetesCluster
from tools.launch.kubernetes.kubeconfig import Access
from tools.launch.launch import Kubernetes, Launch
from tools.launch.machines.capacity import Capacity
from tools.launch.plan import LaunchPlan, Role
from tools.launch.queued.keeper import Keeper
from tools.launch.queued.request import parent, queued_resource

PATH = Path(__file__).parents[2] / "tools" / "launch" / "golden" / "requests.json"
_CFG = Launch.Config(
    experiment="demo",
    devices="v6e:1x1",
    workers=1,
    worker_devices="v6e:1x1",
    kubernetes=Kubernetes.Config(namespace="lab"),
)
_BUNDLE = Bundle("1" * 16, b"code", "")
_POD = {"metadata": {"name": "demo-head-node-0-0-x", "labels": {"axl/run": "demo"}}}


class Recorder(Client):
    """A client that keeps what it would send, and gets answers of a cluster where all goes well."""

    def __init__(self) -> None:
        super().__init__(Access("http://127.0.0.1:1", None, {}, "golden"), sleep=lambda seconds: None)
        self.sent: list[dict[str, Any]] = []
        self._deleted: set[str] = set()

    def _send(self, method: str, target: str, body: Any, renewed: bool) -> tuple[int, Any, bytes]:
        del renewed
        path, _, query = target.partition("?")
        one = {"method": method, "path": path, "query": query, "body": body}
        if one not in self.sent:
            self.sent.append(one)
        if method == "POST":
            self._deleted.discard(f"{path}/{body.get('metadata', {}).get('name')}")
        if method == "DELETE":
            self._deleted.add(path)
        if method == "GET" and path in self._deleted:
            return 404, {}, b"{}"
        return 200, {}, json.dumps(self._answer(method, path)).encode()

    def _answer(self, method: str, path: str) -> Any:
        if path.endswith("/selfsubjectaccessreviews"):
            return {"status": {"allowed": True}}
        if path.endswith("/jobs/demo-code"):
            return {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        if method == "GET" and path.endswith("/pods"):
            return {"items": [_POD]}
        if method == "GET" and path.endswith("/jobsets"):
            made = [one["body"] for one in self.sent if one["method"] == "POST" and one["path"] == path]
            return {"items": made}
        if method == "GET" and "/queuedResources/" in path:
            return next((one["body"] for one in self.sent if one["method"] == "POST"), {})
        return {}


def recorded() -> list[dict[str, Any]]:
    """Return the requests of a run that is submitted, looked at and stopped, and of a queued resource."""
    terms, slices = Capacity("spot"), _CFG.slices_of("worker")
    roles = (Role("head", 1, Capacity("on-demand")), *(Role(one, 1, terms, slices) for one in ("trainer", "worker")))
    plan = LaunchPlan("demo", "rl", _CFG, (), "trainer=v6e:1x1,workers=1 x v6e:1x1", roles, (), 0.0)
    client = Recorder()
    api = KubernetesCluster(client, "lab", _CFG, plan, sleep=lambda seconds: None)
    run = LaunchedRun("demo", api)
    submission.submit(api, _CFG, plan, {"launch.txt": "text"}, _BUNDLE, lambda line: None)
    run.status()
    run.logs(lines=7)
    submission.add_workers(api, _CFG, plan, 1, lambda line: None)
    run.stop(lambda line: None)
    cfg, tpu = CASES["llama2_7b.queued"], Recorder()
    keeper = Keeper(tpu, parent(cfg), "llama2-7b", lambda line: None, lambda seconds: None)
    role = Role("trainer", 1, cfg.terms("trainer"), cfg.slices_of("trainer"))
    request = queued_resource(cfg, LaunchPlan("llama2-7b", "train", cfg, (), None, (role,), (), 0.0), "0" * 16)
    keeper.state()
    keeper._ask(request)  # pyright: ignore[reportPrivateUsage]
    keeper.delete()
    return [_without_tokens(one) for one in (*client.sent, *tpu.sent)]


def _without_tokens(one: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose Secret has a fixed value."""
    if (one["body"] or {}).get("kind") != "Secret":
        return one
    return {**one, "body": {**one["body"], "data": dict.fromkeys(one["body"]["data"], "bm8gc2VjcmV0")}}


def main() -> None:
    """Write the file."""
    PATH.write_text(json.dumps(recorded(), indent=1) + "\n")


if __name__ == "__main__":
    main()
