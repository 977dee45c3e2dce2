"""Errors that a user can cause and correct: one clear message, no traceback.

This module is at the lowest floor and imports nothing of the project, so that every room can raise them and the
command line can tell them from bugs (see ``tools/cli.py``).
"""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

# Control characters but for tabs and line ends, marks of direction, further line ends, halves of pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """Error that the user can correct: what was asked for cannot be done.

    The message names the thing (with its full path), what was expected and, where there is one,
    the nearest right name. Subclasses may also inherit from a built-in, e.g.
    ``class MeshError(UserError, ValueError)``.
    """


class MachineError(UserError):
    """A fault of this machine, whatever config was being built when it was found."""


def printable(text: str) -> str:
    """Return a text that somebody else wrote, for a terminal: what would move its cursor or change it is spelled out.

    Escape sequences can retitle a window, write the clipboard or hide lines, and marks of direction turn words around.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def install_hint(extra: str) -> str:
    """Return the command that installs an optional part of the project, for the end of an error message."""
    if (Path(__file__).parents[1] / "constraints.txt").is_file():
        return f"""in the checkout, pip install -c constraints.txt -e ".[{extra}]" """.rstrip()
    return f'pip install "axlearn-like[{extra}]"'


def did_you_mean(name: str, options: Iterable[str], *, limit: int = 8) -> str:
    """Return the tail of an error message that points from a wrong name to the right ones.

    Args:
        limit: At most so many names are listed when none is near.

    Returns:
        ``"; did you mean 'x'?"`` (or ``'x' or 'y'``) if something is near, else
        ``"; known: a, b, c"``, or an empty string if there are no options at all.
    """
    known = sorted(set(options))
    if not known:
        return ""
    near = nearest(name, known)
    if near:
        return "; did you mean " + " or ".join(repr(match) for match in near) + "?"
    listed = ", ".join(known[:limit])
    more = f", ... ({len(known)} in all)" if len(known) > limit else ""
    return f"; known: {listed}{more}"


def taken_from(path: str | os.PathLike[str]) -> str:
    """Return the tail of an error message that says where a relative path is looked for; empty for an absolute one."""
    return "" if os.path.isabs(path) else f"; a relative path is taken from the working directory, {os.getcwd()}"


def once[K, V](option: str, pairs: Iterable[tuple[K, V]]) -> dict[K, V]:
    """Return the pairs that a repeated option gives as a dict (UserError: a name comes twice, so one would be lost)."""
    found: dict[K, V] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"{option} {name}: expected once, got {found[name]} and {value}")
        found[name] = value
    return found


def nearest(name: str, options: Iterable[str], n: int = 2) -> list[str]:
    """Return at most `n` of the options that are spelt like `name`, upper and lower case apart; the nearest first."""
    folded = {option.casefold(): option for option in options}
    return [folded[match] for match in difflib.get_close_matches(name.casefold(), folded, n=n)]
