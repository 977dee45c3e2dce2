"""Queued resources as status and stop see a cluster: one object for each run, whose logs are in its bucket."""

import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import urlencode

from mesh.errors import UserError
from tools.launch.control.api import ROLE, LaunchedApi, Object
from tools.launch.kubernetes.client import Client
from tools.launch.kubernetes.kubeconfig import Access
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan
from tools.launch.queued.keeper import Keeper
from tools.launch.queued.request import parent, queued_resource

TPU_API = "https://tpu.googleapis.com"
_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"


class GoogleAccess(Access):
    """An API of Google."""

    def __init__(self, server: str = TPU_API, environment: Mapping[str, str] = os.environ):
        context = None if server.startswith("http://127.0.0.1:") else ssl.create_default_context()
        super().__init__(server, context, {}, "the Cloud TPU API")
        self._environment = environment

    def _new_token(self) -> str:
        try:
            command = ["gcloud", "auth", "print-access-token", "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return self._of_machine()

    def _of_machine(self) -> str:
        host = self._environment.get("GCE_METADATA_HOST", "metadata.google.internal")
        asked = urllib.request.Request(f"http://{host}{_TOKEN}", headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(asked, timeout=3) as answer:
                return json.load(answer)["access_token"]
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            raise UserError(
                "no credentials for Google Cloud: `gcloud auth login` makes some; --dry-run DIR needs none"
            ) from None


_BUCKETS = "https://storage.googleapis.com"


class QueuedResources(LaunchedApi):
    """The queued resources of a project in a zone."""

    def __init__(self, client: Client, where: str, say: Callable[[str], None], buckets: str = _BUCKETS):
        """`where`: projects/PROJECT/locations/ZONE. `buckets`: the API of Cloud Storage."""
        self._client, self._where, self._say, self._buckets = client, where, say, buckets

    def submit(self, cfg: Launch.Config, plan: LaunchPlan, archive: tuple[str, bytes] | None) -> Keeper:
        """Ask for the queued resource of a run, after its code is in the bucket.

        Raises:
            UserError: the API refuses it, or the bucket cannot be written. Nothing is asked for then.
        """
        digest = "" if archive is None else archive[0].removeprefix("axl-").removesuffix(".tar.gz")
        request = queued_resource(cfg, plan, digest)
        keeper = self.keeper(plan.name)
        keeper.state()  # credentials, rights, the zone
        if archive is not None:
            place = cfg.place()
            name = "/".join(part for part in (place.folder, "bundles", archive[0]) if part)
            self._upload(place.name, name, archive[1])
        keeper.create(request)
        return keeper

    def keeper(self, run: str) -> Keeper:
        """Return the keeper of a run's resource."""
        return Keeper(self._client, self._where, run, self._say)

    def delete(self, *names: str) -> None:
        """Delete resources with their machines."""
        for name in names:
            self.keeper(name).delete()

    def jobsets(self, run: str) -> list[Object]:
        """Return the resource in the form of a JobSet."""
        state, why = self.keeper(run).state()
        if state == "absent":
            return []
        status: Object = {}
        if state in ("SUSPENDED", "FAILED"):
            status = {"terminalState": "Failed", "conditions": [{"type": "Failed", "reason": state, "message": why}]}
        elif state != "ACTIVE":
            status = {"conditions": [{"type": "Waiting", "status": "True", "message": f"{state}: {why}".rstrip(": ")}]}
        return [{"metadata": {"name": run, "labels": {ROLE: "trainer"}}, "status": status}]

    def pods(self, run: str) -> list[Object]:
        """Return the machines as one Pod, once they are there."""
        if self.keeper(run).state()[0] != "ACTIVE":
            return []
        labels = {"jobset.sigs.k8s.io/jobset-name": run}
        return [{"metadata": {"name": run, "labels": labels}, "status": {"phase": "Running"}}]

    def log(self, pod: str, lines: int) -> str:
        """Say where the logs are."""
        return f"logs of {pod} are in its run directory in the bucket, launch/logs/"

    def _upload(self, bucket: str, name: str, content: bytes) -> None:
        """Write an object unless it is there."""
        access = GoogleAccess(self._buckets)
        query = urlencode({"uploadType": "media", "ifGenerationMatch": "0", "name": name})
        target = f"{self._buckets}/upload/storage/v1/b/{bucket}/o?{query}"
        headers = {"Authorization": f"Bearer {self._client.access.token()}", "Content-Type": "application/gzip"}
        asked = urllib.request.Request(target, content, headers, method="POST")
        try:
            urllib.request.urlopen(asked, timeout=120, context=access.context).close()
        except urllib.error.HTTPError as error:
            if error.code != 412:  # 412: the object exists
                raise UserError(f"bucket {bucket} cannot be written: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"bucket {bucket} cannot be reached: {error}") from None


def queued_resources(cfg: Launch.Config, say: Callable[[str], None]) -> QueuedResources:
    """Return the queued resources of the project and zone that a submission names."""
    return QueuedResources(Client(GoogleAccess()), parent(cfg), say)
