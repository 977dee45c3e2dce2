"""One JobSet while it is carried out: its Pods, what a failure restarts, when it is complete."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from tools.launch.local.manifest import JobSetSpec
from tools.launch.local.pod import Pod

MakePod = Callable[[JobSetSpec, str, Mapping[str, str]], Pod]
Say = Callable[[str], None]

_STEADY = 60.0  # seconds after which a restart is the first again
_LONGEST_PAUSE = 10.0  # seconds between two restarts of what fails at once


class Pause:
    """Seconds between two attempts: what fails as soon as it starts must not take the machine."""

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
    """A JobSet: it restarts as one when a Pod fails, unless the Pod's status or the limit says that it has failed."""

    def __init__(self, spec: JobSetSpec, make: MakePod, say: Say):
        self.spec, self._make, self._say = spec, make, say
        self.restarts = 0
        self.terminal = ""  # Completed or Failed
        self.reason = ""
        self.deleted = False
        self.last_failure: Pod | None = None
        self._pause = Pause()
        self._start_at = 0.0
        self.pods = self._start()  # Pods of the present attempt

    @property
    def running(self) -> bool:
        """True while a Pod of it is there."""
        return any(not pod.ended for pod in self.pods)

    def step(self) -> None:
        """Carry it on."""
        failed = [pod for pod in self.pods if self._has_failed(pod)]
        if self.terminal or self.deleted:
            return
        if self._start_at:  # restarting: the old Pods end first, so that two generations never meet
            if not self.running and time.monotonic() >= self._start_at:
                self._start_at = 0.0
                self.pods = self._start()
        elif failed:
            self._failed(failed[0])
        elif all(pod.ended for pod in self.pods):
            self._end("Completed", "AllJobsCompleted")

    def terminate(self) -> None:
        """Delete it: its Pods are asked to end, and nothing is started any more."""
        self.deleted = True
        self._stop()

    def _start(self) -> list[Pod]:
        self._pause.started()
        return [self._pod(job, index) for job in range(self.spec.replicas) for index in range(self.spec.pods)]

    def _pod(self, job: int, index: int) -> Pod:
        name = f"{self.spec.name}-{self.spec.job}-{job}"
        labels = {
            **self.spec.pod_labels,
            "batch.kubernetes.io/job-name": name,
            "batch.kubernetes.io/job-completion-index": str(index),
            "jobset.sigs.k8s.io/jobset-name": self.spec.name,
            "jobset.sigs.k8s.io/replicatedjob-name": self.spec.job,
            "jobset.sigs.k8s.io/job-index": str(job),
            "jobset.sigs.k8s.io/restart-attempt": str(self.restarts),
        }
        return self._make(self.spec, f"{name}-{index}", labels)

    def _has_failed(self, pod: Pod) -> bool:
        """Look at a Pod; True if it has just failed, and was not asked to end."""
        before = pod.ended
        pod.poll()
        if before or not pod.ended or pod.status == 0 or pod.stopping:
            return False
        self._say(f"{pod.place.name} ended with status {pod.status}")
        return True

    def _failed(self, pod: Pod) -> None:
        self.last_failure = pod
        reason = "PodFailurePolicy" if pod.status in self.spec.final else "BackoffLimitExceeded"
        if pod.status in self.spec.final:
            return self._end("Failed", reason)
        if self.restarts >= self.spec.max_restarts:
            return self._end("Failed", "ReachedMaxRestarts")
        self.restarts += 1
        self._start_at = time.monotonic() + self._pause.next()
        self._stop()
        self._say(f"{self.spec.name} restarts ({pod.place.name}: {reason}), for the {self.restarts}. time")

    def _end(self, state: str, reason: str) -> None:
        self.terminal, self.reason = state, reason
        self._stop()
        self._say(f"{self.spec.name}: {state} ({reason})")

    def _stop(self) -> None:
        for pod in self.pods:
            pod.terminate()

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
