"""Clocks that are hours apart: importing this sets the clock of the process, each role's to another time.

Only what tells the time of day is moved, as on hosts whose clocks were never set; durations stay what they are.
"""

import os
import time

from tests.chaos.flaky_server import FlakyServer

_honest = time.time
SKEW = (os.getpid() % 5 - 2) * 3600.0


def _shifted() -> float:
    return _honest() + SKEW


time.time = _shifted


class SkewedServer(FlakyServer):
    """In an experiment it makes every role import this module, as every role reads the whole config."""

    class Config(FlakyServer.Config):
        pass
