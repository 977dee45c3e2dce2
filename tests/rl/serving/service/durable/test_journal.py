"""Records come back after a kill, in their order; damage is found, and named."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from rl.serving.service.durable import journal as module
from rl.serving.service.durable.journal import JournalDamaged, JournalRecord, RequestJournal


def record(number: int) -> JournalRecord:
    rng = np.random.default_rng(number)
    arrays = {"tokens": rng.integers(0, 99, number % 5).astype(np.int32), "weights": rng.random((2, 3), np.float32)}
    return JournalRecord({"number": number, "text": "ß" * (number % 3)}, arrays)


def same(a: JournalRecord, b: JournalRecord) -> bool:
    arrays = [(name, x.dtype, x.shape, x.tobytes()) for name, x in a.arrays.items()]
    return a.fields == b.fields and arrays == [(name, x.dtype, x.shape, x.tobytes()) for name, x in b.arrays.items()]


def written(path: Path, count: int) -> None:
    journal = RequestJournal(path)
    for number in range(count):
        journal.append(record(number))
    journal.close()


def found(path: Path) -> list[int]:
    journal = RequestJournal(path)
    records = journal.take_found()
    journal.close()
    assert all(same(one, record(one.fields["number"])) for one in records)
    return [one.fields["number"] for one in records]


def test_every_prefix_of_the_file_gives_the_records_that_are_whole_in_it(tmp_path: Path):
    whole, path = tmp_path / "whole", tmp_path / "cut"
    written(whole, 4)
    data = whole.read_bytes()
    ends = np.cumsum([len(record(number).encode()) for number in range(4)])
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        kept = int((ends <= size).sum())
        assert found(path) == list(range(kept))
        assert path.stat().st_size == (0, *ends)[kept], "a rest is cut off, and the next record follows a whole one"


def test_a_changed_byte_is_named_or_cuts_the_last_record_only(tmp_path: Path):
    whole, path = tmp_path / "whole", tmp_path / "damaged"
    written(whole, 3)
    data = whole.read_bytes()
    last = len(data) - len(record(2).encode())
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        if at >= last:
            assert found(path) == [0, 1]
            continue
        number = int(at >= len(record(0).encode()))
        begin = len(record(0).encode()) * number
        with pytest.raises(JournalDamaged, match=f"record {number} at byte {begin} is damaged"):
            RequestJournal(path)
        assert path.stat().st_size == len(data), "nothing is thrown away"


def test_compaction_keeps_what_is_needed_and_a_kill_leaves_one_whole_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "journal"
    journal = RequestJournal(path)
    for number in range(6):
        journal.append(record(number))
    size = journal.size
    journal.compact(lambda one: one.fields["number"] % 2 == 1)
    assert journal.size == path.stat().st_size < size and journal.grown == 0
    journal.append(record(9))
    assert found(path) == [1, 3, 5, 9]
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(5, "killed")))
    with pytest.raises(OSError, match="killed"):
        journal.compact(lambda one: False)
    monkeypatch.undo()
    journal.append(record(10))
    journal.close()
    assert found(path) == [1, 3, 5, 9, 10]


def test_records_of_many_threads_share_their_syncs(tmp_path: Path, monkeypatch):
    syncs, real = [], os.fsync
    journal = RequestJournal(tmp_path / "journal")
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: (syncs.append(descriptor), real(descriptor)))
    threads = [threading.Thread(target=journal.append, args=(record(number),)) for number in range(20)]
    with journal._writing:  # as while another record is written
        for thread in threads:
            thread.start()
        while len(journal._waiting) < 20:
            pass
    for thread in threads:
        thread.join()
    assert len(syncs) == 1
    journal.close()
    assert sorted(found(tmp_path / "journal")) == list(range(20))


def test_a_write_that_fails_is_told_to_its_records_and_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    journal = RequestJournal(tmp_path / "journal")
    journal.append(record(0))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append(record(1))
    monkeypatch.undo()
    journal.append(record(2))
    journal.close()
    assert found(tmp_path / "journal") == [0, 2]
