"""JobSets as read for execution: what counts for a local process; fields that would be left out are refused."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mesh.errors import UserError

# Fields that choose or describe machines and their network: here there is one machine.
_OF_MACHINES = (
    *("serviceAccountName", "automountServiceAccountToken", "nodeSelector", "tolerations", "priorityClassName"),
    *("hostNetwork", "dnsPolicy"),
)
_ACTIONS = (
    *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
)
TPU = "google.com/tpu"


@dataclasses.dataclass(frozen=True)
class ExitRule:
    """Rule of a Job: a Pod with such an exit status fails the Job, whatever its back-off limit."""

    operator: str
    values: tuple[int, ...]

    def matches(self, status: int) -> bool:
        """Return True if it is about this exit status."""
        return status != 0 and (status in self.values) == (self.operator == "In")


@dataclasses.dataclass(frozen=True)
class FailureRule:
    """Rule of a JobSet for a failed Job; empty `reasons` or `jobs`: any."""

    action: str
    reasons: tuple[str, ...]
    jobs: tuple[str, ...]

    def matches(self, job: str, reason: str) -> bool:
        """Return True if it is about a Job of this replicated job that failed for this reason."""
        return (not self.reasons or reason in self.reasons) and (not self.jobs or job in self.jobs)


@dataclasses.dataclass(frozen=True)
class Container:
    """The only container of a Pod.

    Attributes:
        command: and its arguments.
        env: as the manifest has it: `value` or `valueFrom`.
        mounts: path in the container -> host path, claim, or None for an empty folder.
        chips: TPU chips that it asks for.
    """

    name: str
    command: tuple[str, ...]
    env: tuple[Mapping[str, Any], ...]
    mounts: Mapping[str, str | None]
    chips: int


@dataclasses.dataclass(frozen=True)
class ReplicatedJob:
    """Equal indexed Jobs."""

    name: str
    replicas: int
    completions: int
    backoff_limit: int
    rules: tuple[ExitRule, ...]
    labels: Mapping[str, str]
    grace: float
    container: Container


@dataclasses.dataclass(frozen=True)
class JobSetSpec:
    """A JobSet."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    max_restarts: int
    rules: tuple[FailureRule, ...]
    jobs: tuple[ReplicatedJob, ...]
    success: tuple[str, ...] = ()  # replicated jobs that must succeed; empty: all


def read_jobset(manifest: Mapping[str, Any]) -> JobSetSpec:
    """Read a JobSet.

    Raises:
        UserError: it has a field that is not carried out here.
    """
    metadata = manifest["metadata"]
    where = f"JobSet {metadata['name']}"
    spec = _only(manifest["spec"], where, "network", "successPolicy", "failurePolicy", "replicatedJobs")
    policy = _only(spec.get("failurePolicy", {}), where, "maxRestarts", "restartStrategy", "rules")
    success = _only(spec.get("successPolicy", {}), where, "operator", "targetReplicatedJobs")
    if success.get("operator", "All") != "All":
        raise UserError(f"{where}: expected successPolicy.operator All")
    return JobSetSpec(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        labels=metadata.get("labels", {}),
        max_restarts=policy.get("maxRestarts", 0),
        rules=tuple(_failure_rule(rule, where) for rule in policy.get("rules", ())),
        jobs=tuple(_replicated_job(one, where) for one in spec["replicatedJobs"]),
        success=tuple(success.get("targetReplicatedJobs", ())),
    )


def _failure_rule(rule: Mapping[str, Any], where: str) -> FailureRule:
    _only(rule, where, "name", "action", "onJobFailureReasons", "targetReplicatedJobs")
    if rule["action"] not in _ACTIONS:
        raise UserError(f"{where}: {rule['action']} is not carried out here; there are {', '.join(_ACTIONS)}")
    reasons, jobs = rule.get("onJobFailureReasons", ()), rule.get("targetReplicatedJobs", ())
    return FailureRule(rule["action"], tuple(reasons), tuple(jobs))


def _replicated_job(one: Mapping[str, Any], where: str) -> ReplicatedJob:
    _only(one, where, "name", "replicas", "template")
    fields = ("parallelism", "completions", "completionMode", "backoffLimit", "podFailurePolicy", "template")
    job = _only(one["template"]["spec"], where, *fields)
    if job.get("completionMode") != "Indexed" or job["parallelism"] != job["completions"]:
        raise UserError(f"{where}: expected an Indexed Job whose Pods all run at once")
    pod = job["template"]["spec"]
    fields = ("restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes")
    _only(pod, where, *fields, *_OF_MACHINES)
    if pod.get("restartPolicy") != "Never" or len(pod["containers"]) != 1:
        raise UserError(f"{where}: expected Pods of one container with restartPolicy Never")
    return ReplicatedJob(
        name=one["name"],
        replicas=one.get("replicas", 1),
        completions=job["completions"],
        backoff_limit=job.get("backoffLimit", 6),
        rules=tuple(_exit_rule(rule, where) for rule in job.get("podFailurePolicy", {}).get("rules", ())),
        labels=job["template"].get("metadata", {}).get("labels", {}),
        grace=pod.get("terminationGracePeriodSeconds", 30),
        container=_container(pod["containers"][0], pod.get("volumes", ()), where),
    )


def _exit_rule(rule: Mapping[str, Any], where: str) -> ExitRule:
    _only(rule, where, "action", "onExitCodes")
    codes = rule["onExitCodes"]
    if rule["action"] != "FailJob" or codes["operator"] not in ("In", "NotIn"):
        raise UserError(f"{where}: expected FailJob for exit codes In or NotIn a list, in podFailurePolicy")
    return ExitRule(codes["operator"], tuple(codes["values"]))


def _container(one: Mapping[str, Any], volumes: Iterable[Mapping[str, Any]], where: str) -> Container:
    known = ("name", "image", "command", "args", "env", "ports", "resources", "securityContext", "volumeMounts")
    _only(one, where, *known)
    places = {volume["name"]: _place(volume, where) for volume in volumes}
    return Container(
        name=one["name"],
        command=(*one.get("command", ()), *one.get("args", ())),
        env=tuple(one.get("env", ())),
        mounts={mount["mountPath"]: places[mount["name"]] for mount in one.get("volumeMounts", ())},
        chips=int(one.get("resources", {}).get("requests", {}).get(TPU, 0)),
    )


def _place(volume: Mapping[str, Any], where: str) -> str | None:
    if "emptyDir" in volume:
        return None
    if "hostPath" in volume:
        return volume["hostPath"]["path"]
    raise UserError(f"{where}: volume {volume['name']}: expected a folder of this machine (--storage dir:PATH)")


def _only(fields: Mapping[str, Any], where: str, *known: str) -> Mapping[str, Any]:
    for field in fields:
        if field not in known:
            raise UserError(f"{where}: the field {field} is not carried out by a cluster on this machine")
    return fields
