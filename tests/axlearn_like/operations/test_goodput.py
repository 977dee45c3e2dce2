import os
import time

import pytest

from axlearn_like.operations.goodput import CAUSES, Account, CauseClock, account, account_lines, process_began
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows


def row(time, event, **fields):
    return {"time": float(time), "role": "trainer", "event": event, **fields}


def spent(time, since, to, /, **causes):
    return row(time, "goodput", since=since, step=to, seconds=sum(causes.values()), causes=causes)


FIRST = [
    row(110, "train_begin", step=0, began=100.0),
    spent(110, 0, 0, startup=10.0),
    spent(130, 0, 4, compile=12.0, step=8.0),
    spent(142, 4, 10, step=9.0, input=2.0, checkpoint=1.0),
]


def test_one_process():
    found = account([*FIRST, row(142, "train_end", step=10, reason="done")])
    assert found.seconds == {"startup": 10, "compile": 12, "step": 17, "input": 2, "checkpoint": 1}
    assert (found.sessions, found.total) == (1, 42)
    assert found.shares() == pytest.approx(
        {"step": 17 / 42, "input": 2 / 42, "compile": 12 / 42, "checkpoint": 1 / 42, "startup": 10 / 42}
    )
    assert found.shares({"step": 3.0, "idle": 5.0})["step"] == pytest.approx(20 / 50)


def test_a_restart_costs_the_time_without_a_process_and_the_steps_done_again():
    # Killed at 150 or so; the next process begins at 160 and restores step 8.
    again = [row(165, "train_begin", step=8, began=160.0), spent(165, 8, 8, startup=5.0), spent(168, 8, 10, step=3.0)]
    found = account([*FIRST, *again])
    assert found.seconds["down"] == pytest.approx(160 - 142)
    assert found.seconds["lost"] == pytest.approx(9.0 * 2 / 6)  # steps 9 and 10 of the row over steps 5 to 10
    assert found.seconds["step"] == pytest.approx(8.0 + 6.0 + 3.0)
    assert found.total == pytest.approx(168 - 100)  # nothing is counted twice
    # A second restart from step 2: of the first row half is lost as well, and all that came later.
    more = account([*FIRST, *again, row(171, "train_begin", step=2, began=170.0), spent(171, 2, 2, startup=1.0)])
    assert more.seconds["lost"] == pytest.approx(4.0 + 9.0 + 3.0)
    assert more.seconds["step"] == pytest.approx(4.0)
    assert more.sessions == 3


def test_the_days_after_a_run_that_was_done_are_not_down_but_those_after_a_stop_are():
    for reason, down in (("done", None), ("SIGTERM", 58.0)):
        rows = [*FIRST, row(142, "train_end", step=10, reason=reason), row(201, "train_begin", step=10, began=200.0)]
        assert account(rows).seconds.get("down") == down


def test_other_roles_and_logs_without_accounts_are_left_out():
    assert account([{**line, "role": "worker-0"} for line in FIRST]) == Account({}, 0)
    assert account_lines(Account()) == []
    older = account([row(1, "start", pid=3), row(20, "start", pid=7)])
    assert older.total == 0 and account_lines(older) == []


def test_the_table_tells_every_cause_and_the_share():
    told = account_lines(account(FIRST))
    assert told[0] == "goodput 40.5% of 42.0 s in 1 process"
    assert len(told) == 6 and told[1].split()[-3:] == ["17.0", "s", "40.5%"]
    assert all(line.strip().startswith(tuple(CAUSES.values())) for line in told[1:])


def test_a_clock_charges_every_moment_to_one_cause(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    clock = CauseClock(events, began=time.time() - 100, every=0.0)
    events.append("trainer", "train_begin", step=5, began=clock.began)
    clock.start(5)
    began = time.monotonic()
    clock.to("input")
    time.sleep(0.02)
    clock.cause = "step"  # it was none, after all
    clock.to("step")
    with clock.spending("evaluation"):
        time.sleep(0.01)
    assert clock.cause == "step"
    clock.completed(6)
    clock.to("checkpoint")
    clock.flush()
    elapsed = time.monotonic() - began
    found = account(read_rows(tmp_path / "events.jsonl"))
    assert found.seconds["startup"] == pytest.approx(100, abs=1)
    assert "input" not in found.seconds
    assert found.seconds["step"] >= 0.02 and found.seconds["evaluation"] >= 0.01
    told = sum(found.seconds.values()) - found.seconds["startup"]
    assert told <= elapsed + 0.01  # rows are rounded
    assert told == pytest.approx(sum(clock.totals.values()) - clock.totals["startup"], abs=1e-3)


def test_what_a_failing_process_spent_is_told(tmp_path):
    path = tmp_path / "events.jsonl"
    with pytest.raises(OSError, match="gone"), CauseClock(EventLog(path)) as clock:
        clock.start(0)
        clock.to("step")
        raise OSError("gone")
    assert [line["event"] for line in read_rows(path)] == ["goodput", "goodput"]


def test_this_process_began_before_now_and_after_its_parents_birth():
    began = process_began()
    assert began <= time.time()
    if os.path.exists("/proc/self/stat"):
        assert time.time() - began < os.times().elapsed + 1e9 and began == pytest.approx(process_began(), abs=0.1)
