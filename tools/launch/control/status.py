"""Status of a run, and in one line why nothing runs: quota, queue, capacity, image, or a crash with its last words.

Reads conditions of JobSets, Kueue's workloads, Pods and events, as the cluster's API has them.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tools.launch.control.api import ROLE, LaunchedApi, Object, exit_status, finished_at, terminal

_LINES = 3  # last lines shown of a crashed process
_SEARCHED = 30  # lines of one that runs
_PROGRESS = re.compile(r"^(\w+: step \d+ of \d+.*)$", re.MULTILINE)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f]")  # characters that steer a terminal
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ImageInspectError")
_QUOTA = re.compile(r"exceeded quota|quota exceeded|insufficient quota", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class JobSetStatus:
    """One JobSet."""

    name: str
    role: str
    state: str  # running, pending, restarting, completed, failed, suspended or lost
    why: str  # cause if it is not running, in a line; empty where there is no more to say
    restarts: int  # number of restarts so far
    running: int  # Pods that run now

    def line(self) -> str:
        """Return it for a reader."""
        why = _CONTROL.sub("", self.why)
        restarts = f", {self.restarts} restarts" if self.restarts > 1 else ", 1 restart" if self.restarts else ""
        return f"{self.name}: {self.state}{restarts}{': ' if why else ''}{why}"


def status_of(api: LaunchedApi, run: str) -> list[JobSetStatus]:
    """Return the status of every JobSet of a run, the head first."""
    pods, events = api.pods(run), api.events(run)
    found = [_status(api, one, pods, events) for one in api.jobsets(run)]
    order = {"head": 0, "trainer": 1}
    return sorted(found, key=lambda one: (order.get(one.role, 2), len(one.name), one.name))


def verdict(statuses: Sequence[JobSetStatus]) -> str:
    """Return the state of a run in one line."""
    if not statuses:
        return "nothing of it is there"
    states = [one.state for one in statuses]
    bad = next((one for one in statuses if one.state in ("failed", "lost")), None)
    if bad is not None:
        return bad.line()
    if all(state == "completed" for state in states):
        return "completed"
    waiting = next((one for one in statuses if one.why and not one.running), None)
    if waiting is not None:
        return f"{states.count('running')} of {len(states)} run; {waiting.line()}"
    return f"{states.count('running')} of {len(states)} run"


def progress_of(api: LaunchedApi, run: str) -> str:
    """Return the last line of progress that the head, the trainer or the command has printed; empty: none yet."""
    for role in ("head", "trainer", "command"):
        for pod in api.pods(run):
            if pod["metadata"].get("labels", {}).get(ROLE) != role or pod["status"].get("phase") != "Running":
                continue
            if found := _PROGRESS.findall(api.log(pod["metadata"]["name"], _SEARCHED)):
                return _CONTROL.sub("", found[-1])
    return ""


def _status(api: LaunchedApi, jobset: Object, pods: Iterable[Object], events: Iterable[Object]) -> JobSetStatus:
    name, labels = jobset["metadata"]["name"], jobset["metadata"].get("labels", {})
    own = [pod for pod in pods if pod["metadata"].get("labels", {}).get(_JOBSET) == name]
    status = jobset.get("status", {})
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in own)
    restarts, state = status.get("restarts", 0), terminal(jobset).lower()
    why = ""
    if state == "completed":
        pass
    elif status.get("lost"):
        state, why = "lost", "its cluster was killed; submit again, and it goes on from its last checkpoint"
    elif state == "failed":
        reason = next((c for c in status.get("conditions", ()) if c.get("type") == "Failed"), {})
        why = crash(api, own) or f"{reason.get('reason', '')} {reason.get('message', '')}".strip()
    else:
        mine = [one for one in events if one.get("involvedObject", {}).get("name", "").startswith(name)]
        why = "" if running and running == len(own) else blocked(jobset, own, mine)
        state = "suspended" if jobset.get("spec", {}).get("suspend") else "running" if running else "pending"
        if not running and restarts:
            why, state = why or crash(api, own), "restarting"
    return JobSetStatus(name, labels.get(ROLE, ""), state, why, restarts, running)


def crash(api: LaunchedApi, pods: Iterable[Object]) -> str:
    """Return status and last words of the process that failed first, in the latest attempt that has failed."""
    failed = [pod for pod in pods if exit_status(pod) not in (None, 0)]
    if not failed:
        return ""
    latest = max(map(_attempt, failed))
    among = [pod for pod in failed if _attempt(pod) == latest]
    first = min(among, key=finished_at)
    name = first["metadata"]["name"]
    said = " | ".join(line.strip() for line in api.log(name, _LINES).splitlines() if line.strip())
    return f"{name} ended with status {exit_status(first)}{': ' if said else ''}{said}"


def _attempt(pod: Object) -> int:
    """Return the attempts of its JobSet before this Pod."""
    return int(pod["metadata"]["labels"].get(_ATTEMPT, 0))


def blocked(jobset: Object, pods: Sequence[Object], events: Sequence[Object]) -> str:
    """Return why Pods of a JobSet do not run."""
    return next((line for line in _reasons(jobset, pods, events) if line), "")


def _reasons(jobset: Object, pods: Sequence[Object], events: Sequence[Object]) -> Iterator[str]:
    for event in events:
        if _QUOTA.search(event.get("message", "")):
            yield f"quota: {event['message']}"
    yield from _own_conditions(jobset)
    yield from _of_queue(jobset)
    for pod in pods:
        yield from _waits(pod)
    for event in events:
        if event.get("type") == "Warning" and event.get("reason", "").startswith("Failed"):
            yield f"{event['reason']}: {event.get('message', '')}"


def _own_conditions(jobset: Object) -> Iterator[str]:
    for condition in jobset.get("status", {}).get("conditions", ()):
        message = condition.get("message", "")
        if _QUOTA.search(message):
            yield f"quota: {message}"
        if condition.get("type") == "Waiting" and condition.get("status") == "True":
            yield message


def _of_queue(jobset: Object) -> Iterator[str]:
    for condition in jobset.get("workload", {}).get("status", {}).get("conditions", ()):
        if condition.get("status") == "False" and condition.get("type") in ("QuotaReserved", "Admitted"):
            yield f"queue: {condition.get('message', condition.get('reason', ''))}"
        if condition.get("status") == "True" and condition.get("type") == "Evicted":
            yield f"queue: evicted: {condition.get('message', '')}"
    if jobset.get("spec", {}).get("suspend"):
        yield "queue: not admitted yet"


def _waits(pod: Object) -> Iterator[str]:
    status: Mapping[str, Any] = pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield f"capacity: {condition.get('message', condition.get('reason', ''))}"
    for one in status.get("containerStatuses", ()):
        waiting = one.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _IMAGE:
            yield f"image: {waiting['reason']}: {waiting.get('message', '')}"
        elif waiting.get("reason"):
            yield f"{pod['metadata']['name']}: {waiting['reason']} {waiting.get('message', '')}".strip()
