"""The user's consent to what a config's text reaches outside of its run.

A text may come from anyone. A config says by `reaches` what its owner sends where, in these words:

    https://HOST[:PORT]             requests to a host
    VARIABLE@https://HOST[:PORT]    the same, with the key in an environment variable
    wandb:ENTITY/PROJECT            metrics, to an account that the text names
    gs://BUCKET/PATH, s3://...      objects of a bucket
    PATH                            files that are written, outside of the run directory
    ray:HOST:PORT                   joining a Ray cluster on another machine, which can run code in the process
    listen:HOST                     a port that other machines reach
    unisolated                      code of answers without a sandbox
    run:COMMAND                     a program that is started
    VARIABLE@run:COMMAND            the same, with the value of an environment variable
    xla:OPTION=VALUE                options of the compiler that name files

What a text reaches is refused when it is built, unless the user has allowed it: by `--allow ITEM`, in the variable
AXL_ALLOW (items between blanks), or by a run of an experiment of their own, whose items `axl` remembers. What a program
makes itself reaches what it likes. Processes that are started inherit AXL_ALLOW.
"""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from axlearn_like.config.errors import ConfigError

VARIABLE = "AXL_ALLOW"
UNISOLATED = "unisolated"
_MEMORY = "allowed.txt"

_from_text: set[str] = set()  # reach of all texts read in this process


def note_text(items: Iterable[str]) -> None:
    """Note what a config reaches that was read from a text."""
    _from_text.update(items)


def check_consent(items: Iterable[str], path: str) -> None:
    """Refuse what came from a text and is not allowed.

    Raises:
        ConfigError: names the item, and the option that allows it.
    """
    asked = [item for item in items if item in _from_text]
    for item in asked and sorted(set(asked) - allowed()):
        raise ConfigError(
            f"{path}: what was read here {_said(item)}; a file that may be anyone's does so only with your consent. "
            f"If you know and want that, add --allow {shlex.quote(item)} to the command, or to {VARIABLE}",
            path,
        )


def allowed() -> set[str]:
    """Return what the user has allowed."""
    return {*_given(), *user_memory(_MEMORY)}


def allow(items: Iterable[str]) -> None:
    """Allow these in this process, and in those that it starts from now on."""
    os.environ[VARIABLE] = shlex.join(sorted({*_given(), *items}))


def remember_consent(items: Iterable[str]) -> None:
    """Allow what an experiment of the user's own reaches, in later commands too; but never code without a sandbox."""
    for item in items:
        allow([item])
        if item != UNISOLATED:
            add_to_memory(_MEMORY, item)


def passed_on(items: Iterable[str]) -> str:
    """Return the value of AXL_ALLOW for a process that reads a config of this process as text.

    Args:
        items: what that config reaches. What a program made itself is allowed.
    """
    return shlex.join(sorted(allowed() | (set(items) - _from_text)))


def user_memory(name: str) -> list[str]:
    """Return the lines of a file in which `axl` remembers what this user has allowed, outside of any run directory."""
    try:
        return _memory(name).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def add_to_memory(name: str, line: str) -> None:
    """Add a line to such a file, once; without a home to write to, the next command must say it again."""
    if line in user_memory(name):
        return
    try:
        _memory(name).parent.mkdir(parents=True, exist_ok=True)
        with open(_memory(name), "a") as file:
            file.write(line + "\n")
    except OSError:
        pass


def _given() -> list[str]:
    return shlex.split(os.environ.get(VARIABLE, ""))


def _memory(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "axlearn-like" / name


def _said(item: str) -> str:
    """Return what an item does, as a clause."""
    key, at, place = item.partition("@")
    if at and place.startswith(("http://", "https://")):
        return f"sends questions, answers and the key in ${key} to {place}"
    if item == UNISOLATED:
        return "runs code of answers without a sandbox"
    if item.startswith(("http://", "https://")):
        return f"sends questions and answers to {item}"
    if item.startswith("listen:"):
        return f"listens on {item.removeprefix('listen:')}"
    variable, found, program = item.partition("run:")
    if found and variable in ("", f"{key}@"):
        return f"starts the program {program}" + (f" with ${key}" if variable else "")
    if item.startswith("xla:"):
        return f"sets {item.removeprefix('xla:')}, by which the compiler reads or writes files"
    if item.startswith("ray:"):
        return f"joins the Ray cluster at {item.removeprefix('ray:')}, which can run code in this process"
    if item.startswith("wandb:"):
        return f"sends metrics to {item}"
    return f"reads, writes and deletes files in {item}"
