"""Sections of a benchmark, measured one after another: each is shown and kept as it comes, and Ctrl-C ends with those.

A benchmark module names its sections in `SECTIONS`, with the seconds that each takes on two idle cores.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.show import cell, leaves


class Interrupted(KeyboardInterrupt):
    """Ctrl-C within a section; `found`: what it has measured until then."""

    def __init__(self, found: Any):
        super().__init__()
        self.found = found


def find_sections(names: Sequence[str], sections: Mapping[str, float]) -> list[str]:
    """Return the sections of these names, in the benchmark's order; all without names.

    Raises:
        UserError: there is no such section.
    """
    for name in names:
        if name not in sections:
            near = did_you_mean(name, sections)
            raise UserError(f"--sections: there is no {name!r}{near}; expected some of {', '.join(sections)}")
    return [name for name in sections if name in names or not names]


def run_sections[T](
    measures: Mapping[str, Callable[[], T]], say: Callable[[str], None]
) -> tuple[dict[str, T], list[str]]:
    """Return what each section found, and the names of those that Ctrl-C left without an end.

    Of the section that was interrupted there is what it had found, if that is anything (`Interrupted`).
    """
    found: dict[str, T] = {}
    for number, (name, measure) in enumerate(measures.items()):
        began = time.monotonic()
        try:
            found[name] = measure()
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted):
                found[name] = error.found
            missing = list(measures)[number:]
            say(f"interrupted after {time.monotonic() - began:.0f} s of {name}; missing: {', '.join(missing)}")
            return found, missing
        say(f"{name}: done in {time.monotonic() - began:.0f} s" + _figures(found[name]))
    return found, []


def _figures(found: Any) -> str:
    """Return the single figures of a section, one a line; nothing where it has rows that are summarised at the end."""
    if not isinstance(found, dict):
        return ""
    return "".join(f"\n  {name} = {cell(value)}" for name, value in leaves(found).items() if _is_single(value))


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str))
