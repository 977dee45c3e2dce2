"""Writing where there is no room: to /dev/full, and errors as others raise them."""

import asyncio
import errno
import gc
import logging
import pickle
from pathlib import Path

import pytest

from axlearn_like.run.disk import DiskFull, is_full_disk, quieten_full_disk, raising_disk_full
from axlearn_like.run.events import EventLog

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@needs_full
def test_an_event_without_room_says_where():
    with pytest.raises(DiskFull, match="no space left on device: /dev/full; free some and run the same command again"):
        EventLog("/dev/full").append("trainer", "update")


@needs_full
def test_it_is_known_from_other_errors(tmp_path):
    with pytest.raises(FileNotFoundError), raising_disk_full(tmp_path):
        (tmp_path / "none").read_text()
    with pytest.raises(DiskFull, match=str(tmp_path)) as caught, raising_disk_full(tmp_path):
        Path("/dev/full").write_text("a")
    assert is_full_disk(caught.value) and is_full_disk(caught.value.__cause__)
    assert is_full_disk(OSError(errno.EDQUOT, "quota"))
    assert is_full_disk(ValueError("RESOURCE_EXHAUSTED: Failed to write 2 bytes: No space left on device [28]"))
    assert not is_full_disk(ValueError("RESOURCE_EXHAUSTED: out of memory"))


def test_it_travels_between_processes():
    error = pickle.loads(pickle.dumps(DiskFull("/run", "update 6")))
    assert type(error) is DiskFull
    assert str(error).endswith(" /run; free some and run the same command again: it resumes from update 6")


def test_an_error_that_is_among_its_own_causes_has_an_answer():
    first, second = OSError(errno.ENOTDIR, "checkpoints"), ValueError("could not write")
    first.__cause__, second.__cause__ = second, first
    assert not is_full_disk(first) and not is_full_disk(second)
    first.errno = errno.ENOSPC
    assert is_full_disk(second)


def test_only_screens_about_a_full_disk_are_not_logged(caplog):
    quieten_full_disk()
    logger = logging.getLogger("absl")
    logger.propagate, before = True, logger.propagate
    try:
        logger.error("Failed writing: No space left on device")
        logger.error("Failed writing: Permission denied")
    finally:
        logger.propagate = before
    assert [record.getMessage() for record in caplog.records] == ["Failed writing: Permission denied"]


@pytest.mark.slow
def test_writes_that_nobody_waited_for_are_not_logged_where_the_disk_was_full(caplog):
    """Orbax waits for the first that fails, and asyncio logs the others when they are collected."""

    async def write(words: str) -> None:
        raise ValueError(words)

    async def forgotten() -> None:
        for words in ("RESOURCE_EXHAUSTED: Failed writing: No space left on device [28]", "PERMISSION_DENIED"):
            task = asyncio.ensure_future(write(words))
            await asyncio.sleep(0)
            del task

    quieten_full_disk()
    asyncio.run(forgotten())
    gc.collect()
    [record] = [record for record in caplog.records if record.name == "asyncio"]
    assert record.exc_info is not None and "PERMISSION_DENIED" in str(record.exc_info[1])
