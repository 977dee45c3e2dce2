"""Requests of `axl launch` beside those of the official clients: sent by both, they must be the same.

    python -m venv clients && clients/bin/pip install kubernetes google-cloud-tpu
    clients/bin/python tests/golden/launch/clients.py

Needs nothing of this project but tests/tools/launch/golden/requests.json (`tests.golden.launch.sent`). Each request
there is made by the official client of Kubernetes or of Cloud TPU against a recorder on loopback; method, path, query
and body are compared. What has a type there (Job, ConfigMap, Secret, access review, queued resource) is also read into
it and written again: a field that the type does not know would be lost, and is an error.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes.client as k8s  # pyright: ignore[reportMissingImports]
from google.api_core.exceptions import GoogleAPICallError  # pyright: ignore[reportMissingImports]
from google.auth.credentials import AnonymousCredentials  # pyright: ignore[reportMissingImports]
from google.cloud import tpu_v2  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport  # pyright: ignore[reportMissingImports]

PATH = Path(__file__).parents[2] / "tools" / "launch" / "golden" / "requests.json"
_JSON_ENCODING = [("$alt", "json;enum-encoding=int")]  # the official client's own wish for answers
_GROUPS = {"jobsets": ("jobset.x-k8s.io", "v1alpha2")}

Request = dict[str, Any]


class Recorder:
    """A server that keeps the last request, and answers with an empty object."""

    def __init__(self) -> None:
        self.last: Request = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _answer(self) -> None:
                parts, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                query = sorted(pair for pair in parse_qsl(parts.query) if pair not in _JSON_ENCODING)
                outer.last = {"method": self.command, "path": parts.path, "query": query, "body": body}
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self._server.server_address[1]}"


class Kubernetes:
    """The official client of a cluster."""

    def __init__(self, address: str):
        configuration = k8s.Configuration(host=f"http://{address}")
        self._api = k8s.ApiClient(configuration)
        self._core, self._batch = k8s.CoreV1Api(self._api), k8s.BatchV1Api(self._api)
        self._custom, self._review = k8s.CustomObjectsApi(self._api), k8s.AuthorizationV1Api(self._api)

    def send(self, one: Request) -> None:
        """Make a request by the method of the client that is for it."""
        method, path, body = one["method"], one["path"], one["body"]
        kind, _, name = path.partition("/namespaces/lab/")[2].partition("/")
        query = dict(parse_qsl(one["query"]))
        options: dict[str, Any] = {"_preload_content": False}
        if "labelSelector" in query:
            options["label_selector"] = query["labelSelector"]
        if "limit" in query:
            options["limit"] = int(query["limit"])
        if kind in _GROUPS:
            self._custom_object((*_GROUPS[kind], "lab", kind), method, name, body, options)
        elif not kind and method == "GET":
            self._custom.get_api_resources(*_GROUPS["jobsets"], **options)
        elif not kind:
            self._review.create_self_subject_access_review(body, **options)
        elif name.endswith("/log"):
            lines = int(query["tailLines"])
            self._core.read_namespaced_pod_log(name.removesuffix("/log"), "lab", tail_lines=lines, **options)
        else:
            api, words = (self._batch if kind == "jobs" else self._core), _WORDS[kind]
            verb = {"POST": "create", "DELETE": "delete", "GET": "read" if name else "list"}[method]
            given = [name] if name else []
            more = [body] if method == "POST" else []
            if method == "DELETE":
                options["body"] = body
            getattr(api, f"{verb}_namespaced_{words}")(*given, "lab", *more, **options)

    def _custom_object(
        self, where: tuple[str, ...], method: str, name: str, body: Any, options: dict[str, Any]
    ) -> None:
        if method == "POST":
            self._custom.create_namespaced_custom_object(*where, body, **options)
        elif method == "DELETE":
            self._custom.delete_namespaced_custom_object(*where, name, body=body, **options)
        elif name:
            self._custom.get_namespaced_custom_object(*where, name, **options)
        else:
            self._custom.list_namespaced_custom_object(*where, **options)

    def read_again(self, body: Any) -> Any:
        """Return an object as its type writes it; of a JobSet, which has none, the Jobs in it."""
        if body["kind"] == "JobSet":
            for one in body["spec"]["replicatedJobs"]:
                one["template"] = self._typed({"apiVersion": "batch/v1", "kind": "Job", **one["template"]}, "V1Job")
                one["template"] = {name: part for name, part in one["template"].items() if name == "spec"}
            return body
        return self._typed(body, f"V1{body['kind']}")

    def _typed(self, body: Any, kind: str) -> Any:
        return self._api.sanitize_for_serialization(self._api.deserialize(json.dumps(body), kind, "application/json"))


_WORDS = {
    "configmaps": "config_map",
    "secrets": "secret",
    "pods": "pod",
    "events": "event",
    "jobs": "job",
    "serviceaccounts": "service_account",
    "persistentvolumeclaims": "persistent_volume_claim",
}


def send_tpu(client: Any, one: Request) -> None:
    """Make a request by the official client of Cloud TPU."""
    path = one["path"].removeprefix("/v2/")
    try:
        if one["method"] == "POST":
            given = tpu_v2.QueuedResource.from_json(json.dumps(one["body"]))  # refuses a field that it does not know
            name = dict(parse_qsl(one["query"]))["queuedResourceId"]
            parent = path.removesuffix("/queuedResources")
            client.create_queued_resource(parent=parent, queued_resource=given, queued_resource_id=name)
        elif one["method"] == "DELETE":
            client.delete_queued_resource(request=tpu_v2.DeleteQueuedResourceRequest(name=path, force=True))
        else:
            client.get_queued_resource(name=path)
    except GoogleAPICallError:
        pass  # of the empty answer


def main() -> int:
    """Compare all requests; print those that differ."""
    recorder, differ = Recorder(), 0
    cluster = Kubernetes(recorder.address)
    transport = TpuRestTransport(host=recorder.address, url_scheme="http", credentials=AnonymousCredentials())
    tpu = tpu_v2.TpuClient(transport=transport)
    stored: list[Request] = json.loads(PATH.read_text())
    for one in stored:
        if one["path"].startswith("/v2/"):
            send_tpu(tpu, one)
            recorder.last["body"] = _named(recorder.last["body"])
        else:
            cluster.send(one)
        ours = {**one, "query": sorted(parse_qsl(one["query"]))}
        theirs = {**recorder.last, "path": recorder.last["path"].rstrip("/")}
        if theirs["body"] == {} and ours["body"] is None:
            theirs["body"] = None
        kept = ours["body"]
        if kept is not None and "kind" in kept:
            kept = cluster.read_again(json.loads(json.dumps(kept)))
        for what, found in (("the request", theirs), ("its object", {**ours, "body": kept})):
            if found != ours:
                differ += 1
                print(f"{one['method']} {one['path']}: {what} differs:\n  ours   {ours}\n  theirs {found}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("kubernetes", "google-cloud-tpu"))
    print(f"{len(stored)} requests beside those of {versions}: {differ} differ")
    return 1 if differ else 0


def _named(body: Any) -> Any:
    """Return a body with the names of enums, for which the official client sends numbers."""
    for spec in (body or {}).get("tpu", {}).get("nodeSpec", ()):
        config = spec["node"]["acceleratorConfig"]
        config["type"] = tpu_v2.AcceleratorConfig.Type(config["type"]).name
    return body


if __name__ == "__main__":
    sys.exit(main())
