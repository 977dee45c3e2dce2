"""Try all attacks and write their table: `python -m tests.attacks`."""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tests.attacks import files, job, server
from tests.attacks.attack import Attack, Row, try_all
from tests.test_floors import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "attacks.md"
_HELD = " | held | "
HEAD = "| attack | a stranger writes or sends | what must hold | state | seen |\n|---|---|---|---|---|\n"
ALL = (*files.ATTACKS, *server.ATTACKS, *job.ATTACKS)


def tried(folder: Path, word: str = "") -> list[Row]:
    """Try all attacks, or those with a word in their names: on commands, a server and a job, side by side."""

    def on_commands() -> list[Row]:
        return try_all(_named(files.ATTACKS, word), files.Folder(folder))

    def on_server() -> list[Row]:
        with server.place() as running:
            return try_all(_named(server.ATTACKS, word), running)

    def on_job() -> list[Row]:
        with job.place(folder) as running:
            return try_all(_named(job.ATTACKS, word), running)

    groups = {on_commands: files.ATTACKS, on_server: server.ATTACKS, on_job: job.ATTACKS}
    with ThreadPoolExecutor(len(groups)) as threads:
        parts = [threads.submit(run) for run, attacks in groups.items() if _named(attacks, word)]
        return [row for part in parts for row in part.result()]


def _named(attacks: tuple[Attack, ...], word: str) -> list[Attack]:
    return [attack for attack in attacks if word in attack.name]


def page(rows: list[Row]) -> str:
    """Return the page with the table of these rows; those of attacks that were not tried again stay."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition("Made on ")
    lines = {_cell(attack.name): "" for attack in ALL}
    lines |= {
        line[2:].partition(" | ")[0]: line for line in after.splitlines() if line[2:].partition(" | ")[0] in lines
    }
    lines |= {_cell(row.attack.name): _line(row) for row in rows}
    kept = [line for line in lines.values() if line]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    made = (
        f"{datetime.datetime.now(datetime.UTC).date()} at {commit.stdout.strip()} (version {version('axlearn-like')})"
    )
    held = sum(_HELD in line for line in kept)
    return f"{before}Made on {made}: {held} of {len(ALL)} held.\n\n{HEAD}" + "".join(f"{line}\n" for line in kept)


def _line(row: Row) -> str:
    state = "held" if row.held else "got through"
    return f"| {' | '.join(map(_cell, (*row.attack[:3], state, row.seen)))} |"


def _cell(text: str) -> str:
    """Return text of a cell: of one line, without what ends it or is a tag."""
    return re.sub(r"[|<>\[\]*\\\s]+", " ", text).strip()[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="try attacks with this in their names alone")
    word = parser.parse_args().only
    with tempfile.TemporaryDirectory(prefix="axl-attacks-") as folder:
        rows = tried(Path(folder), word)
    PAGE.write_text(page(rows), encoding="utf-8")
    sys.exit(not all(row.held for row in rows))


if __name__ == "__main__":
    main()
