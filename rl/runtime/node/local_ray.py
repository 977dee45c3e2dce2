"""Ray on this machine, held by a process that is no driver: with two raylets, of which each survives the other.

A raylet takes down the actors that it has started, and no others. So a run with a standby has two raylets: the trainer
and its spare belong to different ones, as they would on two machines. A raylet starts in a fifth of a second, Ray in
one and a half.
"""

import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.runtime.node.start import start_node

SIDE = "axl-side"  # label of a node: which of the raylets it is
# A raylet whose port refuses is lost after a third of a second; one that is slow has 10 s for each answer.
_HEALTH = {
    "RAY_health_check_period_ms": "100",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_failure_threshold": "3",
}


class LocalRay:
    """One `gcs_server`, and raylets that are started again while another one lives.

    Attributes:
        address: where the cluster is.
        session: directory of its session.
    """

    def __init__(self, folder: Path, raylets: int):
        """Start it in a folder that has short paths."""
        os.environ |= _HEALTH if raylets > 1 else {}
        self._folder, self._nodes = folder, [start_node(folder, side(0))]
        self.address, self.session = self._nodes[0].gcs_address, self._nodes[0].get_session_dir_path()
        self._nodes += [start_node(folder, side(number), self.address) for number in range(1, raylets)]
        self._gcs, self._current = _process(self._nodes[0], "gcs_server"), list(self._nodes)

    def told(self) -> dict[str, Any]:
        """Return where it is, for drivers."""
        alive = [node for node in self._current if _process(node, "raylet").poll() is None]
        raylets = {node.node_id: _process(node, "raylet").pid for node in alive}
        found = {"address": self.address, "folder": self.session, "gcs_server": self._gcs.pid}
        return {**found, "raylets": raylets, "sides": len(self._current)}

    def hold(self, changed: Callable[[], object], replaced: Callable[[int, int, int], object]) -> str:
        """Hold it until it cannot go on; returns the name of the process that died, with its pid.

        Args:
            changed: called when `told` has changed.
            replaced: called when a raylet was replaced, with its number, its pid, and that of the next one.
        """
        while True:
            raylets = [_process(node, "raylet") for node in self._current]
            descriptors = [os.pidfd_open(process.pid) for process in (self._gcs, *raylets)]
            select.select(descriptors, [], [])
            for descriptor in descriptors:
                os.close(descriptor)
            dead = [number for number, process in enumerate(raylets) if process.poll() is not None]
            if self._gcs.poll() is not None:
                return f"gcs_server (pid {self._gcs.pid})"
            if len(dead) == len(raylets):
                return f"raylet (pid {raylets[0].pid})"
            changed()
            for number in dead:
                self._current[number] = start_node(self._folder, side(number), self.address)
                self._nodes.append(self._current[number])
                changed()
                replaced(number, raylets[number].pid, _process(self._current[number], "raylet").pid)

    def end(self, *, graceful: bool) -> None:
        """End its processes; not `graceful`: at once, because Ray would try for long to reach the one that died."""
        for node in reversed(self._nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=graceful)


def side(number: int) -> dict[str, str]:
    """Return the label of the node of a raylet."""
    return {SIDE: str(number)}


def _process(node: Any, kind: str) -> "subprocess.Popen[bytes]":
    return node.all_processes[kind][0].process
