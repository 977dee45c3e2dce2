"""One JobSet while it is carried out: its Jobs, their Pods, what a failure restarts, when it is complete."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from tools.launch.local.manifest import JobSetSpec, ReplicatedJob
from tools.launch.local.pod import Pod

MakePod = Callable[[JobSetSpec, ReplicatedJob, str, Mapping[str, str]], Pod]
Say = Callable[[str], None]

_POD_POLICY, _BACKOFF = "PodFailurePolicy", "BackoffLimitExceeded"
_STEADY = 60.0  # seconds after which a restart is the first again
_LONGEST_PAUSE = 10.0  # seconds between two restarts of what fails at once
_RESTARTS = {"RestartJobSet": True, "RestartJobSetAndIgnoreMaxRestarts": False}  # whether it counts


class Job:
    """An indexed Job: a Pod for each index until all have succeeded, or the Job has failed."""

    def __init__(self, spec: ReplicatedJob, name: str, labels: Mapping[str, str], make: Callable[..., Pod], say: Say):
        self.spec, self.name, self._labels, self._make, self._say = spec, name, labels, make, say
        self.failed = ""  # the reason
        self.failures = 0
        self.first_failure: Pod | None = None
        self.pods = {index: self._start(index) for index in range(spec.completions)}

    @property
    def complete(self) -> bool:
        """True if every index has succeeded."""
        return not self.failed and all(pod.ended and pod.status == 0 for pod in self.pods.values())

    def step(self) -> None:
        """Look at the Pods; start those again that the back-off limit allows."""
        for index, pod in self.pods.items():
            was = pod.ended
            pod.poll()
            if was or not pod.ended:
                continue
            if pod.status != 0 and not pod.stopping:
                self._pod_failed(index, pod)

    def _pod_failed(self, index: int, pod: Pod) -> None:
        self.first_failure = self.first_failure or pod
        self.failures += 1
        self._say(f"{pod.place.name} ended with status {pod.status}")
        if any(rule.matches(pod.status) for rule in self.spec.rules):
            self._fail(_POD_POLICY)
        elif self.failures > self.spec.backoff_limit:
            self._fail(_BACKOFF)
        elif not self.failed:
            self.pods[index] = self._start(index)

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = reason
            self.terminate()

    def terminate(self) -> None:
        """Ask all Pods to end."""
        for pod in self.pods.values():
            pod.terminate()

    def _start(self, index: int) -> Pod:
        labels = {
            **self._labels,
            "batch.kubernetes.io/job-name": self.name,
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        return self._make(f"{self.name}-{index}", labels)


class JobSet:
    """A JobSet: it restarts as one when a Job fails, unless a rule or the limit says that it has failed."""

    def __init__(self, spec: JobSetSpec, make: MakePod, say: Say):
        self.spec, self._make, self._say = spec, make, say
        self.restarts = self.counted = 0
        self.terminal = ""  # Completed or Failed
        self.reason = ""
        self.deleted = False
        self.last_failure: Pod | None = None
        self._started = time.monotonic()
        self._start_at = 0.0
        self._quick = 0  # restarts that followed each other
        self.jobs: list[Job] = []
        self._create()

    @property
    def running(self) -> bool:
        """True while a Pod of it is there."""
        return any(not pod.ended for pod in self.pods)

    @property
    def pods(self) -> list[Pod]:
        """The Pods of the present attempt."""
        return [pod for job in self.jobs for pod in job.pods.values()]

    def step(self) -> None:
        """Carry it on."""
        for job in self.jobs:
            job.step()
        if self.terminal or self.deleted:
            return None
        if self._start_at:  # restarting: the old Pods end first, so that two generations never meet
            if not self.running and time.monotonic() >= self._start_at:
                self._start_at = 0.0
                self._create()
            return None
        for job in self.jobs:
            if job.failed:
                return self._job_failed(job)
        if self.jobs and all(job.complete for job in self.jobs):
            self._end("Completed", "AllJobsCompleted")

    def terminate(self) -> None:
        """Delete it: its Pods are asked to end, and nothing is started any more."""
        self.deleted = True
        for job in self.jobs:
            job.terminate()

    def _create(self) -> None:
        attempt = {"jobset.sigs.k8s.io/restart-attempt": str(self.restarts)}
        self.jobs, self._started = [], time.monotonic()
        for spec in self.spec.jobs:
            for index in range(spec.replicas):
                name = f"{self.spec.name}-{spec.name}-{index}"
                labels = {
                    **spec.labels,
                    "jobset.sigs.k8s.io/jobset-name": self.spec.name,
                    "jobset.sigs.k8s.io/replicatedjob-name": spec.name,
                    "jobset.sigs.k8s.io/job-index": str(index),
                    **attempt,
                }
                self.jobs.append(Job(spec, name, labels, self._pod(spec), self._say))

    def _pod(self, spec: ReplicatedJob) -> Callable[[str, Mapping[str, str]], Pod]:
        return lambda name, labels: self._make(self.spec, spec, name, labels)

    def _job_failed(self, job: Job) -> None:
        self.last_failure = job.first_failure or self.last_failure
        rule = next((rule for rule in self.spec.rules if rule.matches(job.spec.name, job.failed)), None)
        action = "RestartJobSet" if rule is None else rule.action
        if action == "FailJobSet":
            return self._end("Failed", job.failed)
        if _RESTARTS[action]:
            if self.counted >= self.spec.max_restarts:
                return self._end("Failed", "ReachedMaxRestarts")
            self.counted += 1
        self.restarts += 1
        pause = self._pause()
        self._start_at = time.monotonic() + pause
        for other in self.jobs:
            other.terminate()
        self._say(f"{self.spec.name} restarts ({job.name}: {job.failed}), for the {self.restarts}. time")

    def _pause(self) -> float:
        """Return seconds to wait: what fails as soon as it starts must not take the machine."""
        self._quick = 0 if time.monotonic() - self._started > _STEADY else self._quick + 1
        return 0.0 if self._quick < 2 else min(0.5 * 2**self._quick, _LONGEST_PAUSE)

    def _end(self, state: str, reason: str) -> None:
        self.terminal, self.reason = state, reason
        for job in self.jobs:
            job.terminate()
        self._say(f"{self.spec.name}: {state} ({reason})")

    def as_object(self) -> dict[str, Any]:
        """Return it as the cluster's API would, without its spec."""
        conditions = [{"type": self.terminal, "status": "True", "reason": self.reason}] if self.terminal else []
        return {
            "metadata": {
                "name": self.spec.name,
                "namespace": self.spec.namespace,
                "labels": dict(self.spec.labels),
            },
            "status": {
                "conditions": conditions,
                "restarts": self.restarts,
                "restartsCountTowardsMax": self.counted,
                **({"terminalState": self.terminal} if self.terminal else {}),
            },
        }


def random_suffix() -> str:
    """Return what Kubernetes adds to the name of a Pod."""
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
