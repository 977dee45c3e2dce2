"""The files of a run as its supervisor follows them: completed updates, the processes of the roles, long waits."""

import contextlib
from typing import Any

from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.jsonl import JsonlTail
from mesh import UserError
from rl.experiment import RLExperiment
from rl.runtime.policies.changes import changes_path, policy_run, read_changes
from rl.runtime.policies.runs import policy_runs


class RunLogs:
    """Metrics and events of a run, read as they are written."""

    def __init__(self, cfg: RLExperiment.Config, run: RunDirectory):
        """Begin with the metrics so far, and with the events from now on."""
        parts = policy_runs(cfg.build(), run)
        logs = {run.events_path: None, **{part.run.events_path: None for part in parts}}
        self._events = [JsonlTail(path, from_end=True) for path in logs]
        self._metrics = {part.name: JsonlTail(part.run.metrics_path) for part in parts}
        self._run, self._changes = run, JsonlTail(changes_path(run), from_end=True)
        self._steps = dict.fromkeys(self._metrics, 0)  # completed updates of each policy
        self._reported: set[str] = set()  # waits that were reported since the last update
        self.pids: dict[str, int] = {}  # newest process of each role
        self.left: set[str] = set()  # roles that shut down on SIGTERM and have not restarted
        self.updated()

    @property
    def step(self) -> int:
        """Completed updates, of all policies together where there are several."""
        return sum(self._steps.values())

    def updated(self) -> bool:
        """Read the new metrics; returns True if there was an update."""
        self._follow_joined()
        rows = [
            (policy, row) for policy, tail in self._metrics.items() for row in tail.new_rows() if row["phase"] == "rl"
        ]
        self._steps |= {policy: row["step"] for policy, row in rows}
        if rows:
            self._reported.clear()
        return bool(rows)

    def _follow_joined(self) -> None:
        """Follow the policies that have joined since the last look."""
        if not self._changes.new_lines():
            return
        with contextlib.suppress(UserError):  # a spoilt file, of which the driver tells
            for name in read_changes(self._run).joined.keys() - self._metrics.keys():
                own = policy_run(self._run, name)
                self._metrics[name], self._steps[name] = JsonlTail(own.metrics_path), 0
                self._events.append(JsonlTail(own.events_path))

    def new_events(self) -> list[dict[str, Any]]:
        """Read the new events; of the waits of roles, those that were not reported since the last update."""
        rows = [row for log in self._events for row in log.new_rows() if self._is_new(row)]
        for row in rows:
            if row["event"] == "start" and "pid" in row:
                self.pids[row["role"]] = row["pid"]
                self.left.discard(row["role"])
            elif row["event"] == "shutdown":
                self.left.add(row["role"])
        return rows

    def process(self, name: str) -> str:
        """Return the name of a role with its process id."""
        return f"{name} (pid {self.pids.get(name, 'unknown')})"

    def _is_new(self, row: dict[str, Any]) -> bool:
        if row["event"] != "waiting" or row["role"] == "driver":
            return row["event"] != "waiting"
        new = row["what"] not in self._reported
        self._reported.add(row["what"])
        return new
