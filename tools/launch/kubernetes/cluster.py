"""A cluster of Kubernetes as submission and status see it."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh import UserError
from tools.launch.control.api import RUN, Object
from tools.launch.control.status import crash
from tools.launch.kubernetes.carrier import carrier, carrier_name, parts
from tools.launch.kubernetes.client import Client, Refused
from tools.launch.kubernetes.jobset import token_secret
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
_INSTALLATION = "https://jobset.sigs.k8s.io/docs/installation"
_TEXT = "launch.txt"
_POLL = 2.0  # seconds
_CARRIED = 660.0  # seconds
_RIGHTS = [
    *(("create", "jobset.x-k8s.io", "jobsets"), ("delete", "jobset.x-k8s.io", "jobsets"), ("create", "batch", "jobs")),
    *(("create", "", "configmaps"), ("list", "", "pods"), ("get", "", "pods/log")),
]


class KubernetesCluster:
    """One namespace of a cluster. With `cfg` and `plan` it can be submitted to; without, looked at and stopped."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        cfg: Launch.Config | None = None,
        plan: LaunchPlan | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._client, self._namespace, self._cfg, self._plan, self._sleep = client, namespace, cfg, plan, sleep
        self._core = f"/api/v1/namespaces/{namespace}"
        self._jobsets = f"{JOBSETS}/namespaces/{namespace}/jobsets"
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"

    def check(self) -> None:
        """Refuse a cluster without JobSet, without what the run names, or where we have not the rights."""
        cluster, rights = self._client.access.name, _RIGHTS
        if self._client.find(JOBSETS) is None:
            raise UserError(
                f"{cluster} has no JobSet ({JOBSETS} is not there): {_INSTALLATION} says how it is installed"
            )
        if self._plan is not None and self._plan.command == "rl":
            rights = [*rights, ("create", "", "secrets"), ("delete", "", "secrets")]
        missing = [f"{verb} {resource}" for verb, group, resource in rights if not self._may(verb, group, resource)]
        if missing:
            raise UserError(f"{cluster} does not permit you in namespace {self._namespace}: {', '.join(missing)}")
        if self._cfg is not None:
            self._check_named(self._cfg)

    def place(self, run: str, files: Mapping[str, str], archive: tuple[str, bytes] | None) -> None:
        """Keep the submission's config in a ConfigMap, and bring the code into the storage by a Job."""
        assert self._cfg is not None and self._plan is not None
        labels = {RUN: run, "axl/part": "code"}
        self._remove_carrier(run)
        self._client.delete(f"{self._core}/configmaps/{run}-launch")
        content = [] if archive is None else list(parts(run, archive[1], labels))
        digest = "" if archive is None else archive[0].removeprefix("axl-").removesuffix(".tar.gz")
        try:
            for one in content:
                self._client.post(f"{self._core}/configmaps", one)
            self._client.post(self._jobs, carrier(self._cfg, self._plan, digest, len(content), labels))
            self._wait_for_carrier(run)
        finally:
            self._remove_carrier(run)
        metadata = {"name": f"{run}-launch", "labels": {RUN: run}}
        kept = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_TEXT: files[_TEXT]}}
        self._client.post(f"{self._core}/configmaps", kept)

    def make_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Make a Secret, or leave the one that is there."""
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        run = "" if self._plan is None else self._plan.name
        try:
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": {RUN: run}},
                "data": data,
            }
            self._client.post(f"{self._core}/secrets", body)
        except Refused as error:
            if error.status != 409:
                raise

    def create(self, jobset: Object) -> None:
        """Create a JobSet."""
        try:
            self._client.post(self._jobsets, jobset)
        except Refused as error:
            if error.status == 409:
                name = jobset["metadata"]["name"]
                raise UserError(f"JobSet {name} exists; `axl launch stop` removes it") from None
            raise

    def delete(self, *names: str) -> None:
        """Delete JobSets with their Pods, and return when all are gone, so that their names are free."""
        paths = [f"{self._jobsets}/{name}" for name in names]
        there = [path for path in paths if self._client.delete(path, {"propagationPolicy": "Foreground"})]
        deadline = time.monotonic() + _CARRIED
        for path in there:
            while self._client.find(path) is not None:
                if time.monotonic() > deadline:
                    name = path.rpartition("/")[2]
                    raise UserError(f"{name} is still being deleted; look at `kubectl describe jobsets {name}`")
                self._sleep(_POLL)

    def clean(self, run: str) -> Sequence[str]:
        """Delete the Secret, ConfigMaps and Job of a run."""
        found = self._remove_carrier(run) + self._remove_configmaps(f"{RUN}={run}")
        try:  # read by name: the right to list Secrets shows their content
            if self._client.delete(f"{self._core}/secrets/{token_secret(run)}"):
                found.append(token_secret(run))
        except Refused as error:
            if error.status != 403:  # users who may not delete it have submitted no RL run
                raise
        return found

    def jobsets(self, run: str) -> list[Object]:
        """Return the JobSets of a run; one that waits in a queue of Kueue has its `workload`."""
        try:
            found = self._client.list(self._jobsets, labelSelector=f"{RUN}={run}")
        except Refused as error:
            if error.status != 404:  # 404: there is no JobSet in this cluster
                raise
            return []
        for one in found:
            if one.get("spec", {}).get("suspend"):
                one["workload"] = self._workload(one)
        return found

    def pods(self, run: str) -> list[Object]:
        """Return the Pods of a run."""
        return self._client.list(f"{self._core}/pods", labelSelector=f"{RUN}={run}")

    def events(self, run: str) -> list[Object]:
        """Return what the cluster says of objects whose names begin with the run's."""
        found = self._client.list(f"{self._core}/events")
        return [one for one in found if one.get("involvedObject", {}).get("name", "").startswith(run)]

    def launch_text(self, run: str) -> str:
        """Return the config of the submission."""
        return self._client.get(f"{self._core}/configmaps/{run}-launch")["data"][_TEXT]

    def log(self, pod: str, lines: int) -> str:
        """Return the last lines of a Pod; nothing where it has not begun, or its machine is gone."""
        try:
            return self._client.text(f"{self._core}/pods/{pod}/log", tailLines=str(lines))
        except Refused as error:
            if error.status in (400, 404, 500):
                return ""
            raise

    def _may(self, verb: str, group: str, resource: str) -> bool:
        name, _, part = resource.partition("/")
        asked = {"verb": verb, "group": group, "resource": name, "subresource": part, "namespace": self._namespace}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = self._client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return bool(answer.get("status", {}).get("allowed"))

    def _check_named(self, cfg: Launch.Config) -> None:
        """Refuse a run that names what is not there; what we may not look at is left to the cluster."""
        kubernetes, place = cfg.kubernetes, cfg.place()
        account = kubernetes.service_account
        wanted = {
            f"{self._core}/serviceaccounts/{account}": (
                f"no service account {account}: kubectl create serviceaccount {account} -n {self._namespace} "
                "(launch.kubernetes.service_account names another)"
            )
        }
        if not place.bucket:
            wanted[f"{self._core}/persistentvolumeclaims/{place.name}"] = (
                f"no claim {place.name}: make one that many Pods can write, or give --storage gs://BUCKET/FOLDER"
            )
        if kubernetes.queue is not None:
            wanted[f"{self._kueue()}/localqueues/{kubernetes.queue}"] = (
                f"no queue {kubernetes.queue} of Kueue (--queue)"
            )
        for name, where in cfg.secret_env.items():
            owner = where.partition("/")[0]
            wanted[f"{self._core}/secrets/{owner}"] = f"no Secret {owner}, which launch.secret_env names for {name}"
        for path, message in wanted.items():
            try:
                there = self._client.find(path) is not None
            except Refused as error:
                there = error.status == 403
                if not there:
                    raise
            if not there:
                raise UserError(f"namespace {self._namespace} of {self._client.access.name} has {message}")

    def _wait_for_carrier(self, run: str) -> None:
        deadline, path = time.monotonic() + _CARRIED, f"{self._jobs}/{carrier_name(run)}"
        while time.monotonic() < deadline:
            status: dict[str, Any] = self._client.get(path).get("status", {})
            conditions = {one["type"]: one for one in status.get("conditions", ()) if one.get("status") == "True"}
            if "Complete" in conditions:
                return
            if "Failed" in conditions:
                pods = self._client.list(f"{self._core}/pods", labelSelector=f"{RUN}={run},axl/part=code")
                said = crash(self, pods) or conditions["Failed"].get("message", "")
                raise UserError(f"the storage of the run cannot be written, so nothing was created: {said}")
            self._sleep(_POLL)
        raise UserError(f"the code of {run} did not reach its storage in {_CARRIED:.0f} s; nothing was created")

    def _remove_carrier(self, run: str) -> list[str]:
        """Remove the Job that brings the code, and its parts; return the names of what was there."""
        job = f"{self._jobs}/{carrier_name(run)}"
        there = self._client.delete(job, {"propagationPolicy": "Background"})
        return [carrier_name(run)] * there + self._remove_configmaps(f"{RUN}={run},axl/part=code")

    def _remove_configmaps(self, labels: str) -> list[str]:
        """Remove the ConfigMaps with these labels; return the names of those that were there."""
        names = [one["metadata"]["name"] for one in self._client.list(f"{self._core}/configmaps", labelSelector=labels)]
        return [name for name in names if self._client.delete(f"{self._core}/configmaps/{name}")]

    def _kueue(self) -> str:
        """Return the path of Kueue's objects in the version that this cluster prefers."""
        group = self._client.find("/apis/kueue.x-k8s.io")
        if group is None:
            raise UserError(f"{self._client.access.name} has no Kueue, so no queue (--queue)")
        return f"/apis/kueue.x-k8s.io/{group['preferredVersion']['version']}/namespaces/{self._namespace}"

    def _workload(self, jobset: Object) -> Object:
        """Return Kueue's view of a JobSet, or nothing."""
        try:
            found = self._client.list(f"{self._kueue()}/workloads")
        except UserError:
            return {}
        uid = jobset["metadata"].get("uid")
        owned = (one for one in found for owner in one["metadata"].get("ownerReferences", ()) if owner["uid"] == uid)
        return next(owned, {})
