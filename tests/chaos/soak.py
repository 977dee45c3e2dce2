"""Soak of a run under Ray: what each process holds while elastic workers are killed or stopped again and again.

    python -m tests.chaos.soak FOLDER [MINUTES]

`FOLDER/samples.jsonl` gets a row each half minute; the output ends with the growth a minute after the first five.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from rl.experiment import RLExperiment
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.benches.recovery.run import COMMAND, WatchedRun
from tests.chaos.experiments import endless
from tests.rl.tiny import ascii_share

Held = dict[str, float]
EVERY_S, CALM_S, FIRST_S = 30.0, 75.0, 300.0  # between rows; before and after a loss; left out of the slopes


def slower_share(problem_id: int, answer: str) -> float:
    """Return the tiny experiment's reward after a sleep: an update takes two seconds and a tenth of a core."""
    time.sleep(0.12)
    return ascii_share(problem_id, answer)


def soaked() -> RLExperiment.Config:
    """Return `endless` at about 30 updates a minute."""
    scorer = FunctionScorer.Config(function=slower_share)
    return endless(verifier=Verifier.Config(scorer=scorer, processes=1), workers=1)


def held(run: WatchedRun) -> dict[str, Held]:
    """Return what each process of a run holds, by its role or program; processes alike are added up."""
    roles = {row["pid"]: row["role"] for row in run.events if row["event"] == "start" and "pid" in row}
    roles[run.pid(COMMAND)] = COMMAND
    found: dict[str, Held] = {"files": {"/dev/shm": sum(1 for _ in Path("/dev/shm").iterdir())}}
    for process in _processes(run):
        try:
            memory = process.memory_full_info()
            now = {"processes": 1, "rss_mib": memory.rss / 2**20, "own_mib": memory.uss / 2**20}
            now |= {"files": process.num_fds(), "threads": process.num_threads()}
            scripts = [word for word in process.cmdline()[1:2] if word.endswith(".py")]
            name = roles.get(process.pid) or Path(scripts[0] if scripts else process.name()).name
        except psutil.Error:
            continue
        whole = found.setdefault(name, {})
        whole |= {key: round(whole.get(key, 0) + value, 2) for key, value in now.items()}
    return found


def slopes(rows: list[tuple[float, dict[str, Held]]]) -> dict[str, Held]:
    """Return growth a minute by least squares of what is in nearly all rows (seconds, `held`)."""
    kept = [(seconds, row) for seconds, row in rows if seconds >= FIRST_S]
    found: dict[str, Held] = {}
    for name in sorted({name for _, row in kept for name in row}):
        seen = [(seconds / 60, row[name]) for seconds, row in kept if name in row]
        if len(seen) > max(2, 0.9 * len(kept)):
            minutes = [at for at, _ in seen]
            fits = {key: np.polyfit(minutes, [values[key] for _, values in seen], 1)[0] for key in seen[0][1]}
            found[name] = {key: round(float(fit), 3) for key, fit in fits.items()}
    return found


def _processes(run: WatchedRun) -> Iterator[psutil.Process]:
    assert run.process is not None
    starts = {row["pid"] for row in run.events if row["event"] == "start" and "pid" in row}
    tree = psutil.Process(run.process.pid).children(recursive=True)
    alive = [psutil.Process(pid) for pid in starts - {one.pid for one in tree} if psutil.pid_exists(pid)]
    yield from (psutil.Process(run.process.pid), *tree, *alive)


def main(folder: Path, minutes: float) -> None:
    rows: list[tuple[float, dict[str, Held]]] = []
    ended, number = threading.Event(), 0
    with WatchedRun(folder / "run", "tests.chaos.soak:soaked") as run:
        run.start()
        run.wait_for("the first update", lambda: run.count("update") > 0, 900.0)
        began = time.monotonic()

        def sample() -> None:
            while not ended.wait(EVERY_S):
                rows.append((time.monotonic() - began, held(run)))
                with open(folder / "samples.jsonl", "a") as out:
                    print(json.dumps([round(rows[-1][0], 1), run.step, rows[-1][1]]), file=out)

        threading.Thread(target=sample, daemon=True).start()
        while time.monotonic() - began < 60 * minutes:
            number += 1
            run.join(name := f"elastic-{number}")
            time.sleep(CALM_S)
            run.lose(name, (signal.SIGKILL, signal.SIGSTOP)[number % 2])
            run.leave(name)
            time.sleep(CALM_S)
            run.look()
        ended.set()
        status = run.stop()
    print(f"{run.step} updates, {number} elastic workers lost, status {status}\n{json.dumps(slopes(rows), indent=1)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 40.0)
