"""An `axl` command in the place of an experiment: read before a machine is asked for, with the files that it names."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mesh import UserError
from mesh.errors import did_you_mean
from tools.cli import cli

# FILE.py, FILE.py:FUNCTION, also as the value of an option or of an edit.
_FILE = re.compile(r"(?:^|(?<=[=,]))[^=,:]+\.py(?=$|[:,])")
_OTHERWISE = {
    "train": "axl launch EXPERIMENT --tpu KIND:SHAPE",
    "rl": "axl launch EXPERIMENT --tpu KIND:SHAPE --workers N --worker-tpu KIND:SHAPE",
    "worker": "axl launch add-worker RUN",
    "launch": "axl launch itself",
}


def check_words(words: Sequence[str]) -> list[str]:
    """Refuse what the command line of `axl` would, as far as it can be seen here; return the names of the command.

    Values are left to the command: a file may be where it runs, and not here.

    Raises:
        UserError: there is no such command or option, an argument is missing, or the command is launched otherwise.
    """
    name = words[0] if words else ""
    if name in _OTHERWISE:
        raise UserError(f"axl launch -- {name}: expected another command; there is `{_OTHERWISE[name]}`")
    names, left, found = list[str](), list(words), cli
    context = click.Context(cli, info_name="axl")
    while isinstance(found, click.Group):
        called = " ".join(["axl", *names])
        if not left or left[0].startswith("-"):
            raise UserError(f"axl launch -- {' '.join(words)}: expected a command of `{called}`")
        inner = found.get_command(context, left[0])
        if inner is None:
            hint = did_you_mean(left[0], found.list_commands(context))
            raise UserError(f"{called} has no command {left[0]!r}{hint}")
        names.append(left.pop(0))
        context, found = click.Context(inner, context, names[-1]), inner
    try:
        given, more, _ = found.make_parser(context).parse_args(left)
    except click.UsageError as error:
        raise UserError(f"axl {' '.join(names)}: {error.format_message()}") from None
    if more:
        raise UserError(f"axl {' '.join(names)}: unexpected argument {more[0]!r}")
    missing = [one for one in found.params if one.required and not _is_given(given.get(one.name or ""))]
    if missing:
        raise UserError(f"axl {' '.join(names)}: expected {missing[0].make_metavar(context)}")
    return names


def _is_given(value: Any) -> bool:
    return bool(value) if isinstance(value, tuple | list) else isinstance(value, str)


def own_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the Python files that a command names, as they are named (UserError: one is not there)."""
    for word in words:
        for found in _FILE.finditer(word):
            if not Path(found[0]).expanduser().is_file():
                raise UserError(f"axl launch -- ... {word}: no file {found[0]} here, to send along")
            yield found[0]


def with_files_in(folder: str, word: str) -> str:
    """Return a word of a command whose Python files lie in a folder."""
    return _FILE.sub(lambda found: f"{folder}/{Path(found[0]).name}", word)
