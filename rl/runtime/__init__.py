"""Runtimes: where the roles of an experiment live. The roles themselves do not know.

What Ray reads from the environment when it is imported is set here, which comes before any of our imports of it.
"""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Actors get fresh processes, because of their environment: idle ones made in advance would stay idle.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray would have roles yield to everything else on the machine (nice 15).
os.environ.setdefault("RAY_worker_niceness", "0")
# Errors of loops are told by the driver that waits for them; at the end, when the verifier closes before a worker has
# heard that the run is over, nobody waits.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
# The death of a process is told in a paragraph of Ray's; the runtime tells it in a line of ours.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker died or was killed|Raylet is terminated")
# A process that loses the raylet takes its parent for it, unless told its number, and if that is gone (we are a daemon,
# or what a container runs), exits without a word. Actors are told by their raylet; of a driver we see to it ourselves.
os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
if "RAY_ADDRESS" not in os.environ:
    # Unless it is off, Ray replaces 127.0.0.1 by an address of the network and listens there; the switch is named after
    # the systems on which off is the default.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
