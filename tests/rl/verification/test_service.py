"""The verifier survives everything that a scorer can do, and leaves no process behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.errors import UserError
from rl.verification.scorers import FunctionScorer, Scorer
from rl.verification.service import Verifier
from tests.rl.verification import misbehaving
from tests.rl.verification.processes import descendants


def config(processes: int = 2, deadline_s: float = 1.0) -> Verifier.Config:
    return Verifier.Config(
        scorer=FunctionScorer.Config(function=misbehaving.score),
        processes=processes,
        deadline_s=deadline_s,
    )


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with config().build() as built:
        yield built


def alive(pid: int) -> bool:
    """Return True if a process runs: a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(pids: list[int], seconds: float = 30.0) -> list[int]:
    """Return the processes that are still alive in the end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def check_only(verifier: Verifier, bad: str, status: str, *, among: int = 30) -> None:
    """Score `bad` in the middle of good answers; only it has a status other than "ok"."""
    answers = ["fine"] * among
    answers[among // 2] = bad
    before = verifier.stats()
    scores = verifier.score(range(among), answers)
    for i, score in enumerate(scores):
        expected = (0.0, status) if i == among // 2 else (i / 1000, "ok")
        assert (score.reward, score.status) == expected
    after = verifier.stats()
    assert after[status] - before[status] == 1
    assert after["scored"] - before["scored"] == among


def test_scores_come_back_in_order(verifier: Verifier):
    scores = verifier.score(range(3000), ["fine"] * 3000)
    assert [s.reward for s in scores] == [i / 1000 for i in range(3000)]
    assert all(s.status == "ok" and 0 <= s.seconds < 1 for s in scores)
    assert verifier.score([], []) == []


@pytest.mark.slow
@pytest.mark.parametrize("action", ["hang", "hang-in-c"])
def test_a_hang_times_out_alone(verifier: Verifier, action: str):
    restarts = verifier.stats()["restarts"]
    check_only(verifier, action, "timeout")
    assert verifier.stats()["restarts"] == restarts + 1
    check_only(verifier, action, "timeout", among=1)


@pytest.mark.parametrize("action", ["exit 0", "exit 3", "segfault"])
def test_a_crash_is_its_own_and_of_no_other(verifier: Verifier, action: str):
    check_only(verifier, action, "crash")


@pytest.mark.parametrize("action", ["raise x", "sys-exit", "nan", "text", "memory"])
def test_an_exception_is_an_error_and_kills_nothing(verifier: Verifier, action: str):
    restarts = verifier.stats()["restarts"]
    check_only(verifier, action, "error")
    assert verifier.stats()["restarts"] == restarts
    assert verifier.stats()["last_error"].startswith("problem 15: ")


def test_processes_inherit_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    with config(processes=1).build() as one:
        score = one.score([1], ["variable SOME_API_KEY"])[0]
    assert (score.status, score.error) == ("error", "KeyError: 'SOME_API_KEY'")


FORGED = ("pickle", "message", "huge", "status", "reward", "number", "terms", "seconds")


@pytest.mark.slow
@pytest.mark.parametrize("answer", [f"forge-{kind}" for kind in FORGED])
def test_what_a_process_writes_is_checked(verifier: Verifier, tmp_path: Path, answer: str):
    evidence = tmp_path / "evidence"
    score = verifier.score([5], [f"{answer} {evidence}"])[0]
    assert (score.status, score.reward) == ("crash", 0.0)
    assert not evidence.exists()
    assert verifier.score([6], ["fine"])[0].reward == 0.006


def test_a_process_that_never_stops_sending_ends(verifier: Verifier):
    began = time.monotonic()
    assert verifier.score([5], ["forge-endless"])[0].status == "crash"
    assert time.monotonic() - began < 10


@pytest.fixture(scope="module")
def confined() -> Iterator[Verifier]:
    scorer = misbehaving.Confined.Config()
    with Verifier.Config(scorer=scorer, processes=1, deadline_s=1.0).build() as built:
        built.score([0], ["fine"])
        if not built.stats()["isolation"].startswith("namespaces"):
            pytest.skip(f"no isolation on this machine: {built.stats()['isolation']}")
        yield built


def test_a_confined_process_reaches_nothing(confined: Verifier, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        attacks = [f"read {secret}", f"connect {port}", f"write {__file__}", f"signal {os.getpid()}", "write mark"]
        scores = confined.score(range(5), attacks)
    assert [s.status for s in scores] == ["error"] * 4 + ["ok"]
    kinds = [s.error.partition(":")[0] for s in scores[:4]]
    assert kinds == ["FileNotFoundError", "PermissionError", "OSError", "ProcessLookupError"]
    assert not Path("mark").exists()


def test_a_confined_process_fails_as_others_do(confined: Verifier):
    scores = confined.score(range(5), ["fine", "hang", "exit 3", "segfault", "fine"])
    assert [s.status for s in scores] == ["ok", "timeout", "crash", "crash", "ok"]


def test_what_a_confined_answer_starts_ends_with_its_process(confined: Verifier):
    confined.score([1], ["fine"])
    count = len(descendants(os.getpid()))
    assert confined.score([1], ["daemon"])[0].status == "ok"
    assert len(descendants(os.getpid())) == count + 1
    assert confined.score([1], ["hang"])[0].status == "timeout"
    confined.score([1], ["fine"])
    assert len(descendants(os.getpid())) == count


def test_printing_disturbs_nothing(verifier: Verifier):
    assert verifier.score([7], ["print"])[0].reward == 0.007


def test_processes_have_neither_jax_nor_its_devices(verifier: Verifier):
    assert verifier.score([0], ["environment"])[0].reward == 0.0


def test_many_hangs_end(verifier: Verifier):
    answers = ["hang", "fine", "exit 1", "fine", "hang", "raise x"]
    scores = verifier.score(range(6), answers)
    assert [s.status for s in scores] == ["timeout", "ok", "crash", "ok", "timeout", "error"]
    assert [s.reward for s in scores] == [0, 0.001, 0, 0.003, 0, 0]


@pytest.mark.parametrize(("deaths", "status"), [(1, "ok"), (2, "ok"), (3, "crash")])
def test_an_answer_survives_its_process_being_killed_twice(
    verifier: Verifier, tmp_path: Path, deaths: int, status: str
):
    notes = tmp_path / "deaths"
    notes.write_text("")
    scores = verifier.score([4, 5, 6], ["fine", f"killed {notes} {deaths}", "fine"])
    assert [s.status for s in scores] == ["ok", status, "ok"]
    assert [s.reward for s in scores] == [0.004, 0.005 if status == "ok" else 0.0, 0.006]
    assert notes.read_text() == "x" * deaths


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_killed_or_stopped_while_idle_are_replaced(verifier: Verifier, how: int):
    verifier.score(range(100), ["fine"] * 100)
    for pid in verifier.pids():
        os.kill(pid, how)
    scores = verifier.score(range(100), ["fine"] * 100)
    assert [(s.reward, s.status) for s in scores] == [(i / 1000, "ok") for i in range(100)]


@pytest.mark.slow
def test_a_process_killed_at_work_costs_no_score(verifier: Verifier):
    restarts = verifier.stats()["restarts"]
    stop = threading.Event()

    def kill_now_and_then() -> None:
        for _ in range(3):
            stop.wait(0.5)
            for pid in verifier.pids()[:1]:
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    total = 0
    while killer.is_alive():
        scores = verifier.score(range(500), ["fine"] * 500)
        assert [(s.reward, s.status) for s in scores] == [(i / 1000, "ok") for i in range(500)]
        total += 500
    killer.join()
    assert verifier.stats()["restarts"] > restarts
    assert total > 0


def test_several_callers_share_the_pool(verifier: Verifier):
    results: dict[int, list[float]] = {}

    def call(first: int) -> None:
        ids = range(first, first + 400)
        results[first] = [s.reward for s in verifier.score(ids, ["fine"] * 400)]

    callers = [threading.Thread(target=call, args=(first,)) for first in (0, 1000, 2000)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for first in (0, 1000, 2000):
        assert results[first] == [i / 1000 for i in range(first, first + 400)]


def test_a_long_answer_passes_through_the_link(verifier: Verifier):
    assert verifier.score([3], ["fine " + "x" * 5_000_000])[0].reward == 0.003


def test_ids_and_answers_must_match(verifier: Verifier):
    with pytest.raises(ValueError, match="zip"):
        verifier.score([1, 2], ["fine"])


@pytest.mark.parametrize(
    ("scorer", "start_deadline_s", "message"),
    [
        (misbehaving.CannotStart.Config(), 100.0, "OSError: the answer key is missing"),
        (
            misbehaving.NeverReady.Config(),
            0.5,
            "was not ready after 0.5 s while it built its scorer",
        ),
    ],
)
def test_a_scorer_that_cannot_be_built_is_an_error_of_the_caller(
    scorer: Scorer.Config, start_deadline_s: float, message: str
):
    broken = Verifier.Config(scorer=scorer, processes=1, start_deadline_s=start_deadline_s).build()
    with pytest.raises(RuntimeError, match=message):
        broken.score([1], ["fine"])
    with pytest.raises(RuntimeError, match="nothing can be scored"):
        broken.score([1], ["fine"])
    assert broken.pids() == []
    broken.close()


def test_close_ends_waiting_callers_and_all_processes(tmp_path: Path):
    verifier = config(deadline_s=100.0).build()
    note = tmp_path / "pid"
    verifier.score([1], [f"forget {note}"])
    errors: list[str] = []

    def call() -> None:
        try:
            verifier.score([1], ["hang-in-c"])
        except RuntimeError as error:
            errors.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    pids = [*verifier.pids(), int(note.read_text())]
    assert all(map(alive, pids))
    while verifier.describe_wait().count("at its chunk") < 1:
        time.sleep(0.01)
    verifier.close()
    caller.join()
    assert errors == ["1 of 1 answers were not scored: the verification pool is closed"]
    assert wait_until_dead(pids) == []
    with pytest.raises(RuntimeError, match="the verification pool is closed"):
        verifier.score([1], ["fine"])
    verifier.close()


PARENT = """
import sys, threading, time
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.rl.verification import misbehaving
scorer = FunctionScorer.Config(function=misbehaving.score)
verifier = Verifier.Config(scorer=scorer, processes=3, deadline_s=1000.0).build()
verifier.score(range(9), ["fine"] * 9)
for action in ("hang", "hang-in-c"):
    threading.Thread(target=verifier.score, args=([1], [action]), daemon=True).start()
while verifier.describe_wait().count("at its chunk") < 2 or len(verifier.pids()) < 3:
    time.sleep(0.01)
time.sleep(0.5)
print(*verifier.pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["kill -9", "exit without close"])
def test_no_process_outlives_its_parent(how: str):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert parent.stdout is not None and parent.stdin is not None
    with parent.stdout, parent.stdin:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        if how == "kill -9":
            parent.kill()
        else:
            parent.stdin.close()
        assert parent.wait() == (-9 if how == "kill -9" else 0)
    assert wait_until_dead(pids) == []


def test_impossible_settings_are_refused():
    with pytest.raises(UserError, match=r"Verifier\.processes: expected 1 or more, got 0"):
        config(processes=0).build()
