"""The processes of a Ray node, less those that no run asks for, with a warm interpreter for its workers.

    python -m rl.runtime.node.start start --head ...

A head starts a server of the dashboard, also where there is no dashboard, and waits for it; `ray.init` starts an
autoscaler's monitor and a monitor of logs as well. Every node starts two agents, and has joined when both have imported
what they need, which takes 1.2 CPU seconds: one serves a dashboard, the other makes environments for actors. A run has
none of these.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.runtime.node.warm import VARIABLE, fork_server, run_worker

PACKAGE, CHECKED = "ray", ">=2.56,<3"  # private names used here hold for these versions (tests/test_private_calls.py)
_OTHER_COMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")
_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")
_WORKER = Path(__file__).parent / "worker.py"
# A raylet must have two agents: it gets idle ones, and ports that say that no agent listens.
_IDLE = subprocess.list2cmdline([sys.executable, "-I", "-S", str(Path(__file__).parent / "no_agent.py")])
_NO_AGENTS = {
    "--dashboard_agent_command": _IDLE,
    "--runtime_env_agent_command": _IDLE,
    "--metrics-agent-port": "-1",
    "--metrics_export_port": "-1",
    "--dashboard_agent_listen_port": "-1",
    "--runtime_env_agent_port": "-1",
}


@contextmanager
def few_processes() -> Iterator[None]:
    """Let a node that is started in this process, in this context, start what holds and places actors alone."""
    from ray._private import services
    from ray._private.node import Node  # some have options, in some ways to start a head

    kept = {name: getattr(Node, name) for name in _UNUSED if hasattr(Node, name)}
    start_process: Any = services.start_ray_process

    def start_nothing(self: Any, *_: Any, **__: Any) -> None:
        del self

    def start(command: list[str], kind: str, *given: Any, **named: Any) -> Any:
        return start_process(raylet_command(command) if kind == "raylet" else command, kind, *given, **named)

    for name in kept:
        setattr(Node, name, start_nothing)
    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = start_process
        for name, method in kept.items():
            setattr(Node, name, method)


def start_node(folder: Path, labels: Mapping[str, str], address: str = "") -> Any:
    """Start a node on loopback, for as long as this process lives; returns Ray's object. `address` "": a new head."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    params = RayParams(
        num_cpus=64,  # roles are processes, not cores: Ray must not limit them on one machine
        include_dashboard=False,
        object_store_memory=256 << 20,
        node_ip_address="127.0.0.1",
        temp_dir=str(folder),
        labels=dict(labels),
        **({"gcs_address": address, "node_manager_port": 0} if address else {}),
    )
    with few_processes():
        return Node(params, head=not address, shutdown_at_exit=False, spawn_reaper=True)


def nodes_of_actors() -> dict[str, str]:
    """Return the nodes of all actors that Ray believes to be alive, by their names."""
    from ray._private.state import actors

    rows: Any = actors(actor_state_name="ALIVE").values()
    return {row["Name"]: row["Address"]["NodeID"] for row in rows}


def raylet_command(command: Sequence[str]) -> list[str]:
    """Return the command of a raylet with idle agents, whose workers come from the warm interpreter if there is one."""
    found = [word for word in command if word.partition("=")[0] not in _NO_AGENTS]
    if VARIABLE in os.environ:
        from ray._private.workers import default_worker

        found = [word.replace(default_worker.__file__, str(_WORKER)) for word in found]
    return [*found, *(f"{option}={value}" for option, value in _NO_AGENTS.items())]


def main() -> None:
    """Run Ray's own command line; at a node, where the environment names a socket, beside a warm interpreter.

    At a head that socket is the run's own command's.
    """
    if (path := os.environ.get(VARIABLE)) and "--head" not in sys.argv and not fork_server(path):
        run_worker()
    # Other commands than `ray start`, which Ray leaves out where they cannot be imported: half of what it imports here.
    sys.modules |= dict.fromkeys(_OTHER_COMMANDS)
    from ray.scripts.scripts import main as ray

    with few_processes():
        ray()


if __name__ == "__main__":
    sys.exit(main())
