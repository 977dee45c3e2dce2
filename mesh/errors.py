"""Errors that a user can cause and correct: one clear message, no traceback.

This module is at the lowest floor and imports nothing, so that every room can raise them and the
command line can tell them from bugs (see ``tools/cli.py``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Error that the user can correct: what was asked for cannot be done.

    The message names the thing (with its full path), what was expected and, where there is one,
    the nearest right name. Subclasses may also inherit from a built-in, e.g.
    ``class MeshError(UserError, ValueError)``.
    """


def install_hint(extra: str) -> str:
    """Return the command that installs an optional part of the project, for the end of an error message."""
    return f"""in the checkout, pip install -c constraints.txt -e ".[{extra}]" """.rstrip()


def did_you_mean(name: str, options: Iterable[str], *, limit: int = 8) -> str:
    """Return the tail of an error message that points from a wrong name to the right ones.

    Args:
        name: What the user wrote.
        options: The names that would have been accepted.
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


def nearest(name: str, options: Iterable[str], n: int = 2) -> list[str]:
    """Return at most `n` of the options that are spelt like `name`, upper and lower case apart; the nearest first."""
    folded = {option.casefold(): option for option in options}
    return [folded[match] for match in difflib.get_close_matches(name.casefold(), folded, n=n)]
