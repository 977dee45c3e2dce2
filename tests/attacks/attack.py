"""An attack, and the outcome of trying it."""

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Attack(NamedTuple):
    """One attack.

    Attributes:
        name: the target, and what is tried.
        writes: what the stranger writes or sends.
        holds: what must hold.
        run: tries it on a place; returns what was seen. An error: it did not hold.
        quick: it is one of those that `make test` tries.
    """

    name: str
    writes: str
    holds: str
    run: Callable[[Any], str]
    quick: bool = False


class Row(NamedTuple):
    """An attack that was tried: what was seen, of one that got through why."""

    attack: Attack
    held: bool
    seen: str


def try_all(attacks: Iterable[Attack], place: Any) -> list[Row]:
    """Try attacks one after the other on a place, such as a running server."""
    rows = []
    for attack in attacks:
        began = time.monotonic()
        try:
            rows.append(Row(attack, True, attack.run(place)))
        except Exception as error:  # such as a server that does not answer in time
            rows.append(Row(attack, False, f"{type(error).__name__}: {error}"))
        print(f"{attack.name}: {rows[-1].held} in {time.monotonic() - began:.1f} s: {rows[-1].seen:.200}", flush=True)
    return rows


def check_words(said: str) -> str:
    """Return the last line of what a command said: sentences, without control characters and tracebacks."""
    assert said.strip(), "it said nothing"
    assert "Traceback" not in said, said[-600:]
    assert not _CONTROL.search(said), repr(said[-600:])
    assert len(said) < 20_000, f"{len(said):,} characters"
    return said.strip().splitlines()[-1]
