"""JobSets as read for execution: what counts for a local process."""

import dataclasses
from collections.abc import Mapping
from typing import Any

TPU = "google.com/tpu"


@dataclasses.dataclass(frozen=True)
class Container:
    """The only container of a Pod."""

    name: str
    command: tuple[str, ...]  # command with its arguments
    env: tuple[Mapping[str, Any], ...]  # variables as the manifest has them: `value` or `valueFrom`
    mounts: Mapping[str, str | None]  # path in the container -> host path, or None for an empty folder
    chips: int  # TPU chips that it asks for


@dataclasses.dataclass(frozen=True)
class JobSetSpec:
    """A JobSet, which restarts as one: equal indexed Jobs, whose Pods all run at once."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    max_restarts: int
    job: str  # name of its replicated job
    replicas: int  # number of Jobs
    pods: int  # Pods of a Job
    final: frozenset[int]  # exit statuses that fail it
    pod_labels: Mapping[str, str]  # labels of its Pods
    grace: float  # seconds between SIGTERM and SIGKILL
    container: Container


def read_jobset(manifest: Mapping[str, Any]) -> JobSetSpec:
    """Read a JobSet of one replicated job, whose Pods of one container all run at once."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    (one,) = spec["replicatedJobs"]
    job = one["template"]["spec"]
    pod = job["template"]["spec"]
    return JobSetSpec(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        labels=metadata.get("labels", {}),
        max_restarts=spec["failurePolicy"]["maxRestarts"],
        job=one["name"],
        replicas=one["replicas"],
        pods=job["completions"],
        final=frozenset(n for rule in job["podFailurePolicy"]["rules"] for n in rule["onExitCodes"]["values"]),
        pod_labels=job["template"]["metadata"]["labels"],
        grace=pod["terminationGracePeriodSeconds"],
        container=_container(pod),
    )


def _container(pod: Mapping[str, Any]) -> Container:
    (container,) = pod["containers"]
    places = {one["name"]: one["hostPath"]["path"] if "hostPath" in one else None for one in pod["volumes"]}
    return Container(
        name=container["name"],
        command=(*container["command"], *container.get("args", ())),
        env=tuple(container["env"]),
        mounts={mount["mountPath"]: places[mount["name"]] for mount in container["volumeMounts"]},
        chips=int(container.get("resources", {}).get("requests", {}).get(TPU, 0)),
    )
