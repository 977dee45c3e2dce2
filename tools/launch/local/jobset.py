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


class Job:
    """An indexed Job: a Pod for each index until all have succeeded, or one has failed."""

    def __init__(self, spec: ReplicatedJob, name: str, start: Callable[[int], Pod]):
        self.spec, self.name = spec, name
        self.failed = ""  # the reason
        self.first_failure: Pod | None = None
        self.pods = [start(number) for number in range(spec.pods)]

    @property
    def complete(self) -> bool:
        """True if every index has succeeded."""
        return not self.failed and all(pod.ended and pod.status == 0 for pod in self.pods)

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
        self.restarts = 0
        self.terminal = ""  # Completed or Failed
        self.reason = ""
        self.deleted = False
        self.last_failure: Pod | None = None
        self._pause = Pause()
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
        failed = next((job for job in self.jobs if job.failed), None)
        if failed is not None:
            self._job_failed(failed)
        elif all(job.complete for job in self.jobs):
            self._end("Completed", "AllJobsCompleted")

    def terminate(self) -> None:
        """Delete it: its Pods are asked to end, and nothing is started any more."""
        self.deleted = True
        for job in self.jobs:
            job.terminate()

    def _create(self) -> None:
        self._pause.started()
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
        }

        def start(number: int) -> Pod:
            own = {**labels, "batch.kubernetes.io/job-completion-index": str(number)}
            return self._make(self.spec, spec, f"{name}-{number}", own)

        return Job(spec, name, start)

    def _job_failed(self, job: Job) -> None:
        self.last_failure = job.first_failure or self.last_failure
        if job.failed in self.spec.final:
            return self._end("Failed", job.failed)
        if self.restarts >= self.spec.max_restarts:
            return self._end("Failed", "ReachedMaxRestarts")
        self.restarts += 1
        self._start_at = time.monotonic() + self._pause.next()
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
                **({"terminalState": self.terminal} if self.terminal else {}),
            },
        }


def random_suffix() -> str:
    """Return what Kubernetes adds to the name of a Pod."""
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
