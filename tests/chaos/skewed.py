"""Clocks that are hours apart: importing this module shifts the clock of the process, for each role by another amount.

Only the time of day is shifted, as on hosts whose clocks were never set; durations stay as they are.
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
    """A parameter server whose config makes every role import this module: every role reads the whole config."""

    class Config(FlakyServer.Config):
        pass
