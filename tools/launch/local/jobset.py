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
_UNCOUNTED = "AndIgnoreMaxRestarts"


class Job:
    """An indexed Job: a Pod for each index until all have succeeded, or one has failed."""

    def __init__(self, spec: ReplicatedJob, index: int, name: str, start: Callable[[int], Pod]):
        self.spec, self.index, self.name = spec, index, name
        self.failed = ""  # the reason
        self.start_at: float | None = None  # start of the next attempt, if the Job alone is restarted
        self.first_failure: Pod | None = None
        self.pods = [start(number) for number in range(spec.pods)]

    @property
    def complete(self) -> bool:
        """True if every index has succeeded."""
        return not self.failed and all(pod.ended and pod.status == 0 for pod in self.pods)

    @property
    def ended(self) -> bool:
        """True once nothing of it is left."""
        return all(pod.ended for pod in self.pods)

    def step(self, say: Say) -> None:
        """Look at the Pods; the first that fails ends all."""
        for pod in self.pods:
            was = pod.ended
            pod.poll()
            if was or not pod.ended or pod.status == 0 or pod.stopping:
                continue
            say(f"{pod.place.name} ended with status {pod.status}")
            self.first_failure = self.first_failure or pod
            self.failed = self.failed or (_POD_POLICY if pod.status in self.spec.final else _BACKOFF)
        if self.failed:
            self.terminate()

    def terminate(self) -> None:
        """Ask all Pods to end."""
        for pod in self.pods:
            pod.terminate()


class Pause:
    """Seconds between two attempts of a Job: what fails as soon as it starts must not take the machine."""

    def __init__(self) -> None:
        self._started, self._quick = 0.0, 0

    def started(self) -> None:
        """Note that an attempt begins."""
        self._started = time.monotonic()

    def next(self) -> float:
        """Return the seconds to wait after an attempt that has failed."""
        self._quick = 0 if time.monotonic() - self._started > _STEADY else self._quick + 1
        return 0.0 if self._quick < 2 else min(0.5 * 2**self._quick, _LONGEST_PAUSE)


class JobSet:
    """A JobSet: it restarts as one when a Job fails, unless a rule or the limit says that it has failed."""

    def __init__(self, spec: JobSetSpec, make: MakePod, say: Say):
        self.spec, self._make, self._say = spec, make, say
        self.restarts = self.counted = 0
        self.job_restarts: dict[str, list[int]] = {job.name: [0] * job.replicas for job in spec.jobs}
        self.terminal = ""  # Completed or Failed
        self.reason = ""
        self.deleted = False
        self.last_failure: Pod | None = None
        self._pauses: dict[str, Pause] = {}
        self._start_at = 0.0
        self.jobs: list[Job] = []
        self._create()

    @property
    def running(self) -> bool:
        """True while a Pod of it is there."""
        return any(not pod.ended for pod in self.pods)

    @property
    def pods(self) -> list[Pod]:
        """The Pods of the present attempt."""
        return [pod for job in self.jobs for pod in job.pods]

    def step(self) -> None:
        """Carry it on."""
        for job in self.jobs:
            job.step(self._say)
        if self.terminal or self.deleted:
            return
        if self._start_at:  # restarting: the old Pods end first, so that two generations never meet
            if not self.running and time.monotonic() >= self._start_at:
                self._start_at = 0.0
                self._create()
            return
        for job in self.jobs:
            if job.failed and job.start_at is None:
                self._job_failed(job)
                if self.terminal or self._start_at:
                    return
        self._restart_jobs()
        if all(job.complete for job in self.jobs if job.spec.name in self.spec.success):
            self._end("Completed", "AllJobsCompleted")

    def terminate(self) -> None:
        """Delete it: its Pods are asked to end, and nothing is started any more."""
        self.deleted = True
        for job in self.jobs:
            job.terminate()

    def _create(self) -> None:
        self.jobs = [self._job(spec, index) for spec in self.spec.jobs for index in range(spec.replicas)]

    def _job(self, spec: ReplicatedJob, index: int) -> Job:
        name = f"{self.spec.name}-{spec.name}-{index}"
        labels = {
            **spec.labels,
            "batch.kubernetes.io/job-name": name,
            "jobset.sigs.k8s.io/jobset-name": self.spec.name,
            "jobset.sigs.k8s.io/replicatedjob-name": spec.name,
            "jobset.sigs.k8s.io/job-index": str(index),
            "jobset.sigs.k8s.io/restart-attempt": str(self.restarts),
            "jobset.sigs.k8s.io/job-restart-attempt": str(self.job_restarts[spec.name][index]),
        }
        self._pauses.setdefault(name, Pause()).started()

        def start(number: int) -> Pod:
            own = {**labels, "batch.kubernetes.io/job-completion-index": str(number)}
            return self._make(self.spec, spec, f"{name}-{number}", own)

        return Job(spec, index, name, start)

    def _restart_jobs(self) -> None:
        """Start Jobs again that are restarted alone, once their old Pods have ended."""
        for place, job in enumerate(self.jobs):
            if job.start_at is not None and job.ended and time.monotonic() >= job.start_at:
                self.jobs[place] = self._job(job.spec, job.index)

    def _job_failed(self, job: Job) -> None:
        self.last_failure = job.first_failure or self.last_failure
        action = self.spec.action(job.spec.name, job.failed)
        if action == "FailJobSet":
            return self._end("Failed", job.failed)
        if not action.endswith(_UNCOUNTED):
            if self.counted >= self.spec.max_restarts:
                return self._end("Failed", "ReachedMaxRestarts")
            self.counted += 1
        pause = self._pauses[job.name].next()
        if action.removesuffix(_UNCOUNTED) == "RestartJob":
            self.job_restarts[job.spec.name][job.index] += 1
            job.start_at = time.monotonic() + pause
            return self._say(f"{job.name} restarts alone ({job.failed})")
        self.restarts += 1
        self._start_at = time.monotonic() + pause
        for other in self.jobs:
            other.terminate()
        self._say(f"{self.spec.name} restarts ({job.name}: {job.failed}), for the {self.restarts}. time")

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
                "replicatedJobsStatus": [
                    {"name": name, "jobRestarts": counts} for name, counts in self.job_restarts.items()
                ],
                "restartsCountTowardsMax": self.counted,
                **({"terminalState": self.terminal} if self.terminal else {}),
            },
        }


def random_suffix() -> str:
    """Return what Kubernetes adds to the name of a Pod."""
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
