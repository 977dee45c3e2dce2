"""A process of a launched run, in its container: its rank, its chips, its log, its end.

    python -m tools.launch.process train --name JOBSET --run-dir DIR [--hosts N --slices S --meet HOST:PORT] -- COMMAND
    python -m tools.launch.process command --name JOBSET --run-dir DIR --folder DIR -- COMMAND
    python -m tools.launch.process head --name JOBSET --run-dir DIR --port PORT --nodes N -- COMMAND
    python -m tools.launch.process node --name JOBSET --run-dir DIR --hosts N --head HOST:PORT
    python -m tools.launch.process added --name JOBSET --run-dir DIR --head HOST:PORT -- COMMAND

`head` starts a Ray cluster and runs the command, which waits for it while both start; `node` adds its machine to that
cluster until the run has ended.
`added` does so for a machine on which nothing is placed, and runs a command there: one more worker.
Rank, world size and meeting point come from the arguments and from the index that Kubernetes gives; what the platform
says of slices (stale after some preemptions) is corrected. A process that was asked to stop ends with status 143, also
where its command saved and ended with 0: the run is not complete, and restarts. One whose command fails the same way
three times ends with status 2 (`repeats.py`), which nothing starts again.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.launch.process.child import STOPPED, StopSignals, run_command
from tools.launch.process.machine import MachineError, check_machine, corrected, meeting_host, release_lock
from tools.launch.process.ray_cluster import RESTART, run_head, run_node
from tools.launch.process.repeats import settled


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    own, command = list(arguments), list[str]()
    if "--" in own:
        cut = own.index("--")
        own, command = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tools.launch.process")
    parser.add_argument("mode", choices=["train", "command", "head", "node", "added"])
    parser.add_argument("--name", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--chips", type=int, default=0)
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--meet", default=os.environ.get("AXL_MEET"))  # named by the script under Slurm
    parser.add_argument("--head")
    parser.add_argument("--role", default="worker")
    found = parser.parse_args(own)
    found.command = command
    return found


def main(arguments: Sequence[str]) -> int:
    """Run a process and return its exit status."""
    given, stop = parse(arguments), StopSignals()
    try:
        index = check_machine(given, os.environ)
        environment = corrected(os.environ, given.slices, index // given.hosts, meeting_host(given))
        log = given.run_dir / "launch" / "logs" / f"{given.name}-{index}.log"
        if given.mode == "head" or given.mode == "train" and index == 0:
            release_lock(given.run_dir, socket.gethostname())
        if given.mode == "head":
            return run_head(given, log, environment, stop)
        if given.mode in ("node", "added"):
            return run_node(given, log, environment, stop)
        count = given.hosts * given.slices
        if given.meet:
            given.command += ["--processes", str(count), "--process", str(index), "--meet", given.meet]
        status = run_command(given.command, log, environment, stop, given.folder)
        return status if stop.child is None else settled(status, stop.child, stop, given.run_dir)
    except MachineError as error:
        print(f"axl: {error}", file=sys.stderr)
        return STOPPED if stop.requested else RESTART


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
