"""A small API server on loopback: objects in memory, a token, pages, and faults by script."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
PAGE = 2  # items


class FakeCluster:
    """State of a cluster in a namespace.

    Attributes:
        objects: by path.
        faults: (method and path as a pattern, status, headers, message), each for one request.
        logs: logs of Pods, by name.
        requests: methods and paths that came with the right token.
        denied: resources that may not be created.
        carried: condition that ends the Job which carries the code.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.faults: list[tuple[str, int, dict[str, str], str]] = []
        self.logs: dict[str, str] = {}
        self.requests: list[str] = []
        self.denied: set[str] = set()
        self.has_jobset = True
        self.carried = "Complete"
        self.token = "good"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # headers and content in one packet

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, headers, found = outer.answer(self.command, self.path, body, self.headers["Authorization"])
                if status == 0:  # closed in the middle
                    self.close_connection = True
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
                    return
                content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path, user: Object | None = None) -> Path:
        """Write a configuration of kubectl that names this cluster."""
        known = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "fake", "user": "me"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.address}}],
            "users": [{"name": "me", "user": user or {"token": self.token}}],
        }
        path.write_text(yaml.safe_dump(known))
        return path

    def put(self, path: str, found: Object) -> None:
        self.objects[f"{path}/{found['metadata']['name']}"] = found

    def answer(self, method: str, target: str, body: Any, authorization: str | None) -> tuple[int, dict[str, str], Any]:
        if authorization != f"Bearer {self.token}":
            return 401, {}, {"message": "Unauthorized"}
        parts = urlsplit(target)
        path, query = parts.path, {name: value[0] for name, value in parse_qs(parts.query).items()}
        self.requests.append(f"{method} {path}")
        for fault in self.faults:
            if re.search(fault[0], f"{method} {path}"):
                self.faults.remove(fault)
                return fault[1], fault[2], {"message": fault[3]}
        if path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            return 201, {}, {"status": {"allowed": asked["resource"] not in self.denied}}
        if path == JOBSETS:
            return (200, {}, {"kind": "APIResourceList"}) if self.has_jobset else (404, {}, {"message": "not found"})
        if path == "/apis/kueue.x-k8s.io":
            return 200, {}, {"preferredVersion": {"version": "v1beta2"}}
        if path.endswith("/log"):
            lines = self.logs.get(path.split("/")[-2], "").splitlines()
            return 200, {}, "\n".join(lines[-int(query["tailLines"]) :])
        return getattr(self, f"_{method.lower()}")(path, query, body)

    def _get(self, path: str, query: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        del body
        if path in self.objects:
            return 200, {}, self.objects[path]
        if not re.search(r"/(jobsets|jobs|pods|configmaps|secrets|events|workloads)$", path):
            return 404, {}, {"message": f"{path} not found"}
        wanted = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
        found = [
            one
            for name, one in sorted(self.objects.items())
            if name.rpartition("/")[0] == path and wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        start = int(query.get("continue", 0))
        more = {"continue": str(start + PAGE)} if len(found) > start + PAGE else {}
        return 200, {}, {"items": found[start : start + PAGE], "metadata": more}

    def _post(self, path: str, query: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        name = f"{path}/{body['metadata']['name']}"
        if name in self.objects:
            return 409, {}, {"message": f"{name} already exists"}
        if query.get("dryRun") == "All":
            return 201, {}, body
        if path.endswith("/jobs"):
            body["status"] = {"conditions": [{"type": self.carried, "status": "True", "message": "BackoffLimit"}]}
        self.objects[name] = body
        return 201, {}, body

    def _delete(self, path: str, query: dict[str, str], body: Any) -> tuple[int, dict[str, str], Any]:
        del query, body
        found = self.objects.pop(path, None)
        return (404, {}, {"message": "not found"}) if found is None else (200, {}, found)
