"""Access to a cluster: server and credentials of kubectl's own configuration, or of the Pod that this process is in."""

import base64
import binascii
import dataclasses
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from mesh.errors import UserError

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_TIMEOUT = 60.0  # seconds
_LOGIN = "`gcloud container clusters get-credentials CLUSTER --location PLACE` writes it"


@dataclasses.dataclass
class Access:
    """Server of a cluster, and how to speak to it."""

    server: str  # address, https:// or (of a proxy on this machine) http://
    context: ssl.SSLContext | None  # context of TLS; None: http
    user: Mapping[str, Any]  # user of the configuration, whose token may come from a program
    name: str  # name of the cluster, for messages
    _token: str = dataclasses.field(default="", repr=False)

    def token(self, *, renewed: bool = False) -> str:
        """Return the bearer token, or nothing; `renewed`: the last one was refused.

        Raises:
            UserError: the program that makes tokens fails.
        """
        if not self._token or renewed:
            self._token = self._new_token()
        return self._token

    def _new_token(self) -> str:
        if "token" in self.user:
            return self.user["token"]
        if "tokenFile" in self.user:
            return Path(self.user["tokenFile"]).read_text().strip()
        return _token_by_program(self.user["exec"], self.name) if "exec" in self.user else ""


def find_access(environment: Mapping[str, str] = os.environ, in_pod: Path = _IN_POD) -> Access:
    """Return the access that kubectl would have.

    Raises:
        UserError: there is no configuration, or it says something that is not understood here.
    """
    given = environment.get("KUBECONFIG", "")
    path = Path(given.split(os.pathsep)[0] if given else Path.home() / ".kube" / "config")
    if path.is_file():
        return _of_file(path)
    host, token = environment.get("KUBERNETES_SERVICE_HOST"), in_pod / "token"
    if not given and host and token.is_file():
        context = ssl.create_default_context(cafile=str(in_pod / "ca.crt"))
        server = f"https://{host}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"
        return Access(server, context, {"tokenFile": str(token)}, "this cluster")
    raise UserError(f"no credentials for a cluster: there is no {path}; {_LOGIN}, and --dry-run DIR needs none")


def _of_file(path: Path) -> Access:
    try:
        found: Any = yaml.safe_load(path.read_text())
        current = found["current-context"]
        context = _named(found["contexts"], current)["context"]
        cluster = _named(found["clusters"], context["cluster"])["cluster"]
        user = dict(_named(found["users"], context["user"])["user"])
        server = cluster["server"].rstrip("/")
    except (yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise UserError(f"{path}: no current context with a cluster and a user ({error!r}); {_LOGIN}") from None
    if "auth-provider" in user:
        raise UserError(f"{path}: user {context['user']} has an auth-provider, which kubectl has given up; {_LOGIN}")
    if "proxy-url" in cluster:
        raise UserError(f"{path}: cluster {context['cluster']} has a proxy-url, which is not supported")
    if "tokenFile" in user:
        user["tokenFile"] = str(path.parent / user["tokenFile"])
    if server.startswith("http://") and urlsplit(server).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise UserError(f"{path}: {server} is not encrypted; expected https://, or a proxy on this machine")
    tls = None if server.startswith("http://") else _tls(cluster, user, path)
    return Access(server, tls, user, context["cluster"])


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], path: Path) -> ssl.SSLContext:
    try:
        data, file = cluster.get("certificate-authority-data"), cluster.get("certificate-authority")
        context = ssl.create_default_context(
            cafile=None if file is None else str(path.parent / file),
            cadata=None if data is None else base64.b64decode(data).decode(),
        )
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if "client-certificate-data" in user:
            with tempfile.NamedTemporaryFile() as both:  # ssl reads files only; this one is ours alone
                for part in ("client-certificate-data", "client-key-data"):
                    both.write(base64.b64decode(user[part]) + b"\n")
                both.flush()
                context.load_cert_chain(both.name)
        elif "client-certificate" in user:
            context.load_cert_chain(path.parent / user["client-certificate"], path.parent / user["client-key"])
    except (OSError, KeyError, binascii.Error, ssl.SSLError) as error:
        raise UserError(f"{path}: certificates cannot be used: {error!r}; {_LOGIN}") from None
    return context


def _token_by_program(program: Mapping[str, Any], cluster: str) -> str:
    """Return the token that a credential plugin prints, such as gke-gcloud-auth-plugin."""
    command = [program["command"], *(program.get("args") or ())]
    version = program.get("apiVersion", "client.authentication.k8s.io/v1beta1")
    asked = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}})
    variables = {one["name"]: one["value"] for one in program.get("env") or ()}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": asked},
            capture_output=True,
            text=True,
            timeout=_EXEC_TIMEOUT,
            check=True,
        )
        return json.loads(done.stdout)["status"]["token"]
    except FileNotFoundError:
        hint = program.get("installHint", "").strip().partition("\n")[0]
        raise UserError(f"credentials for {cluster} come from {command[0]}, which is not installed. {hint}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()[-1:]
        raise UserError(f"{command[0]} gives no credentials for {cluster}: {''.join(said)}; log in again") from None
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        raise UserError(f"{command[0]} gives no credentials for {cluster}: {type(error).__name__}") from None
