"""Attacks of strangers on real commands, a real server and a real job; the page has the table of the last run."""

import re
from pathlib import Path

import pytest

from tests.attacks import files, server
from tests.attacks.__main__ import ALL, PAGE, page, tried
from tests.attacks.attack import Attack, Row, check_words, try_all


def got_through(rows: list[Row]) -> dict[str, str]:
    return {row.attack.name: row.seen for row in rows if not row.held}


def quick(attacks: tuple[Attack, ...]) -> list[Attack]:
    return [attack for attack in attacks if attack.quick]


@pytest.mark.slow
def test_no_file_of_a_stranger_moves_a_command(tmp_path: Path) -> None:
    rows = try_all(quick(files.ATTACKS), files.Folder(tmp_path))
    assert got_through(rows) == {} and len(rows) >= 3


@pytest.mark.slow
def test_no_request_of_a_stranger_stops_the_server() -> None:
    with server.place() as running:
        rows = try_all(quick(server.ATTACKS), running)
    assert got_through(rows) == {} and len(rows) >= 15


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_all_attacks_hold_and_make_the_table(tmp_path: Path) -> None:
    """The table is left at `attacks.md` in the folder of the test; `python -m tests.attacks` writes the page."""
    rows = tried(tmp_path)
    (tmp_path / "attacks.md").write_text(page(rows), encoding="utf-8")
    assert got_through(rows) == {}


def test_the_page_has_the_table_of_a_run_of_these_attacks() -> None:
    """After a change of an attack `python -m tests.attacks` makes it again: what was seen is never written by hand."""
    text = PAGE.read_text(encoding="utf-8")
    listed = [line.split(" | ")[:3] for line in page([Row(attack, True, "x") for attack in ALL]).splitlines()]
    found = [line.split(" | ") for line in text.splitlines()]
    assert [row[:3] for row in found if len(row) == 5] == [row for row in listed if len(row) == 3]
    assert {row[3] for row in found[found.index(["|---|---|---|---|---|"]) + 1 :]} == {"held"}
    assert re.search(
        rf"^Made on 20\d\d-\d\d-\d\d at [0-9a-f]+ \(.+\): {len(ALL)} of {len(ALL)} held\.$", text, re.MULTILINE
    )


@pytest.mark.parametrize("said", ["", "Traceback (most recent call last):", "\x1b]0;owned\x07", "x" * 30_000])
def test_what_a_command_must_not_say_is_found(said: str) -> None:
    def attacked(_: object) -> str:
        return check_words(said)

    (row,) = try_all([Attack("name", "writes", "holds", attacked)], None)
    assert not row.held
