"""A process that hangs under a watchdog; what becomes of it is for the test to see."""

import sys
import threading
import time
from pathlib import Path

from axlearn_like.operations.watchdog import Watchdog
from axlearn_like.run.events import EventLog


def hang_in_this_function(seconds: float) -> None:
    threading.Event().wait(seconds)


if __name__ == "__main__":
    run_dir, exit_after, hangs = Path(sys.argv[1]), float(sys.argv[2]) or None, float(sys.argv[3])
    cfg = Watchdog.Config(dump_after=0.4, exit_after=exit_after, starting=60.0)
    doing = ["startup"]
    events = EventLog(run_dir / "events.jsonl")
    with cfg.build(run_dir=run_dir, events=events, doing=lambda: doing[0]) as watchdog:
        time.sleep(1.0)  # longer than `dump_after`, but it is only starting
        doing[0] = "input"
        for step in range(1, 8):
            time.sleep(0.1)
            watchdog.beat(step)
        hang_in_this_function(hangs)
        watchdog.beat(8)
        time.sleep(0.2)
    print("ended by itself")
