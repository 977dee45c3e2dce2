"""A cluster as submission and status see it: objects as the API of Kubernetes has them, on GKE or on this machine."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Object = dict[str, Any]
RUN, ROLE = "axl/run", "axl/role"  # labels


class LaunchedApi(Protocol):
    """Requests about runs that were launched. A UserError says what was refused, and the way out."""

    def delete(self, *names: str) -> None:
        """Delete JobSets at once, and return when they are gone; their Pods get SIGTERM, and their grace."""
        ...

    def clean(self, run: str) -> Sequence[str]:
        """Delete what else belongs to a run, but not its results; return names. Default: there is nothing else."""
        return []

    def jobsets(self, run: str) -> list[Object]:
        """Return the JobSets of a run."""
        ...

    def pods(self, run: str) -> list[Object]:
        """Return the Pods of a run."""
        ...

    def events(self, run: str) -> list[Object]:
        """Return what the cluster reports about the objects of a run. Default: nothing."""
        return []

    def log(self, pod: str, lines: int) -> str:
        """Return the last lines of a Pod's output."""
        ...


class ClusterApi(LaunchedApi, Protocol):
    """Requests to a cluster that runs can be submitted to."""

    def check(self) -> None:
        """Refuse a cluster that could not run anything, before something is created."""
        ...

    def place(self, run: str, files: Mapping[str, str], archive: tuple[str, bytes] | None) -> None:
        """Bring the files of a submission and the code (name, content) to where the Pods read them."""
        ...

    def make_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Make a Secret, or leave the one that is there."""
        ...

    def create(self, jobset: Object) -> None:
        """Create a JobSet."""
        ...

    def launch_text(self, run: str) -> str:
        """Return the config of the submission, as text."""
        ...


def terminal(jobset: Object) -> str:
    """Return Completed or Failed, or nothing while a JobSet goes on."""
    return jobset.get("status", {}).get("terminalState", "")


def exit_status(pod: Object) -> int | None:
    """Return the exit status of a Pod that has ended."""
    return None if (ended := _ended(pod)) is None else ended["exitCode"]


def finished_at(pod: Object) -> str:
    """Return when a Pod ended, in an order; empty: it has not."""
    return str((_ended(pod) or {}).get("finishedAt", ""))


def _ended(pod: Object) -> Object | None:
    states = (one.get("state", {}) for one in pod.get("status", {}).get("containerStatuses", ()))
    return next((state["terminated"] for state in states if state.get("terminated") is not None), None)
