"""Processes of our own that measure: a module that prints a result, or an object whose methods are called from here."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]  # holds the package `tools`, in a checkout and where installed
TIMEOUT_S = 3600.0


class MeasurementFailed(RuntimeError):
    """A measuring process that failed or took too long; the message has its last lines."""


@dataclass(frozen=True)
class Command:
    """A worker's program, arguments and environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


def worker_environ(**extra: str) -> dict[str, str]:
    """Return the environment that all workers share: CPU only, without the caller's settings that change figures.

    JAX's compilation cache on disk is off, so that the first step is cold.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
    environ = {key: value for key, value in os.environ.items() if key not in dropped}
    return environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"} | extra


def our_command(module: str, *arguments: str) -> Command:
    """Return the command that runs a module of ours with the current interpreter."""
    return Command((sys.executable, "-m", module, *arguments), worker_environ(PYTHONPATH=str(ROOT)))


def run_command(command: Command, *, said: str = "", **environ: str) -> Any:
    """Run a command and return the JSON value in the last line of its standard output; `said`: its standard input.

    Raises:
        MeasurementFailed: it failed, or took too long.
    """
    try:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
        done = subprocess.run(command.argv, env={**command.environ, **environ}, input=said, **options)
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"not done within {TIMEOUT_S:g} s") from None
    if done.returncode:
        reason = "\n".join(done.stderr.splitlines()[-8:])
        raise MeasurementFailed(f"ended with status {done.returncode}\n{reason}")
    return json.loads(done.stdout.splitlines()[-1])


class _Manager(BaseManager):
    """The standard library's server of objects to other processes."""


def _end_with_parent() -> None:
    """Watch, in a process of `multiprocessing`, for the end of its parent: a server would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextlib.contextmanager
def in_process(kind: Callable[..., Any], **options: Any) -> Iterator[Any]:
    """Yield a proxy of `kind(**options)`, which lives in a fresh process until the end of the block.

    Its public methods may be called by several threads at once; arguments and results are pickled.
    """
    _Manager.register(kind.__name__, kind)
    manager = _Manager(ctx=multiprocessing.get_context("spawn"), shutdown_timeout=30.0)
    manager.start(_end_with_parent)
    with manager:
        yield getattr(manager, kind.__name__)(**options)
