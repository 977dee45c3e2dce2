"""JobSets as read for execution: what counts for a local process; what would be left out is refused."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mesh.errors import UserError

# Fields that are carried out here, or choose and describe machines and their network, of which there is one.
_KNOWN = frozenset(
    "apiVersion kind metadata name namespace labels annotations spec template network "
    "failurePolicy maxRestarts restartStrategy rules action operator "
    "onJobFailureReasons replicatedJobs replicas parallelism completions completionMode backoffLimit podFailurePolicy "
    "onExitCodes values restartPolicy terminationGracePeriodSeconds serviceAccountName automountServiceAccountToken "
    "nodeSelector tolerations priorityClassName hostNetwork dnsPolicy containers image command args env ports "
    "resources securityContext volumeMounts mountPath volumes hostPath path type emptyDir medium".split()
)
_OPEN = frozenset("network labels annotations nodeSelector tolerations env ports resources securityContext".split())
TPU = "google.com/tpu"


@dataclasses.dataclass(frozen=True)
class Container:
    """The only container of a Pod.

    Attributes:
        command: and its arguments.
        env: as the manifest has it: `value` or `valueFrom`.
        mounts: path in the container -> host path, or None for an empty folder.
        chips: TPU chips that it asks for.
    """

    name: str
    command: tuple[str, ...]
    env: tuple[Mapping[str, Any], ...]
    mounts: Mapping[str, str | None]
    chips: int


@dataclasses.dataclass(frozen=True)
class JobSetSpec:
    """A JobSet, which restarts as one: equal indexed Jobs, whose Pods all run at once.

    Attributes:
        job: name of its replicated job.
        replicas: number of Jobs.
        pods: Pods of a Job.
        final: exit statuses that fail it.
        pod_labels: labels of its Pods.
        grace: seconds between SIGTERM and SIGKILL.
    """

    name: str
    namespace: str
    labels: Mapping[str, str]
    max_restarts: int
    job: str
    replicas: int
    pods: int
    final: frozenset[int]
    pod_labels: Mapping[str, str]
    grace: float
    container: Container


def read_jobset(manifest: Mapping[str, Any]) -> JobSetSpec:
    """Read a JobSet.

    Raises:
        UserError: it has a field or a value that is not carried out here.
    """
    metadata, spec = manifest["metadata"], manifest["spec"]
    where, policy = f"JobSet {metadata['name']}", spec.get("failurePolicy", {})
    for field in _fields(manifest):
        _expect(field in _KNOWN, f"{where}: the field {field} is not carried out by a cluster on this machine")
    for rule in policy.get("rules", ()):
        said = f"{where}: {rule['action']} is not carried out here; there is FailJobSet"
        _expect(rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"], said)
    _expect(len(spec["replicatedJobs"]) == 1, f"{where}: expected one replicated job")
    (one,) = spec["replicatedJobs"]
    job = one["template"]["spec"]
    pod = job["template"]["spec"]
    at_once = job.get("completionMode") == "Indexed" and job["parallelism"] == job["completions"]
    _expect(at_once, f"{where}: expected an Indexed Job whose Pods all run at once")
    alone = pod.get("restartPolicy") == "Never" and len(pod["containers"]) == 1 and job.get("backoffLimit") == 0
    _expect(alone, f"{where}: expected Pods of one container with restartPolicy Never and backoffLimit 0")
    rules = job.get("podFailurePolicy", {}).get("rules", ())
    fails = all(rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "In" for rule in rules)
    _expect(fails, f"{where}: expected FailJob for exit codes In a list, in podFailurePolicy")
    return JobSetSpec(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        labels=metadata.get("labels", {}),
        max_restarts=policy.get("maxRestarts", 0),
        job=one["name"],
        replicas=one.get("replicas", 1),
        pods=job["completions"],
        final=frozenset(status for rule in rules for status in rule["onExitCodes"]["values"]),
        pod_labels=job["template"].get("metadata", {}).get("labels", {}),
        grace=pod.get("terminationGracePeriodSeconds", 30),
        container=_container(pod, where),
    )


def _container(pod: Mapping[str, Any], where: str) -> Container:
    (container,) = pod["containers"]
    places = {volume["name"]: _place(volume, where) for volume in pod.get("volumes", ())}
    return Container(
        name=container["name"],
        command=(*container.get("command", ()), *container.get("args", ())),
        env=tuple(container.get("env", ())),
        mounts={mount["mountPath"]: places[mount["name"]] for mount in container.get("volumeMounts", ())},
        chips=int(container.get("resources", {}).get("requests", {}).get(TPU, 0)),
    )


def _place(volume: Mapping[str, Any], where: str) -> str | None:
    folder = "hostPath" in volume or "emptyDir" in volume
    _expect(folder, f"{where}: volume {volume['name']}: expected a folder of this machine (--storage dir:PATH)")
    return volume["hostPath"]["path"] if "hostPath" in volume else None


def _fields(value: Any) -> Iterator[str]:
    """Yield the names of fields of a manifest, without those that anything may be in."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield name
        for one in () if name in _OPEN else inner if isinstance(inner, list) else [inner]:
            yield from _fields(one)


def _expect(fits: bool, message: str) -> None:
    if not fits:
        raise UserError(message)
