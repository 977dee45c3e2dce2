"""Threads that a process does not wait for, such as those of compilations, and how it ends beside them."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context

_threads: list[threading.Thread] = []  # threads that were begun; some may be over


def begin_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Begin `work` in a thread that does not keep the process alive: it must leave nothing half done."""
    _threads[:] = [one for one in _threads if one.is_alive()]
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.append(thread)
    thread.start()
    return thread


def in_background[T](work: Callable[[], T]) -> Callable[[], T]:
    """Begin `work` in such a thread, within the context of the caller; returns a function that waits for its result.

    That function raises what `work` has raised. What jax has per thread, such as a mesh, `work` enters itself. At its
    end the interpreter waits for `work`, unless `leave` ends the process.

    >>> from mesh.programs.background import in_background
    >>> wait = in_background(lambda: sum(range(4)))
    >>> wait()
    6
    """
    done, around = Future[T](), copy_context()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # the one who waits raises it
            done.set_exception(error)

    thread = begin_thread(lambda: around.run(run), "background")
    atexit.register(thread.join)
    return done.result


def leave(status: int) -> None:
    """End the process at once if such threads still work; else return.

    An interpreter that ends beside a compiler in a thread takes its memory away: the process would crash.
    """
    if any(thread.is_alive() for thread in _threads):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
