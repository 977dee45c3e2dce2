"""The Ray runtime: every role in a process of its own.

Ray reads its environment when it is imported. It is set here, because a package is imported before its modules.
"""

import os
import secrets
import sys

from rl.runtime.node import RAY

os.environ |= {**RAY, **os.environ}
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The driver reports errors of loops. At the end of a run the verifier may close before a worker knows that the run is
# over; nobody waits for that error.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
# A call that fails is held back for a second by default, to learn whether its actor is dead, also when that is back;
# and a process looks once a second for calls that are held back, or to be made again.
os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "100")
os.environ.setdefault("RAY_core_worker_internal_heartbeat_ms", "100")
# Ray reports the death of a process in a paragraph; the runtime reports it in one line.
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX", "worker died or was killed|Raylet is terminated|has been marked dead"
)
# A process that loses its raylet assumes that the raylet is its parent, unless the pid is given, and exits silently if
# the parent is gone (a daemon, or pid 1 of a container). Raylets give actors their pid; here the driver gets one.
os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
if "RAY_ADDRESS" not in os.environ:
    # Otherwise Ray replaces 127.0.0.1 by a network address and listens there; the switch is named after the systems
    # on which "0" is the default.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # A token for the sessions of this process. By default Ray writes one into the home directory, readable by all who
    # can read that. Where Ray was imported before, it has read the mode, and its default stays.
    ours = "ray" not in sys.modules and "RAY_AUTH_TOKEN_PATH" not in os.environ
    if ours and os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
