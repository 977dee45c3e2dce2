"""Work in threads that Ctrl-C does not wait for: a compilation of minutes, or a request to a server that is silent."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence

from mesh.programs.background import begin_thread


def map_in_threads[T, R](work: Callable[[T], R], items: Sequence[T], count: int | None = None) -> list[R]:
    """Return `work` of all items in their order, `count` at a time (None: as many as cores).

    The first error ends it and is raised; so is KeyboardInterrupt, at once. Items that have not begun are left then,
    and those under way go on in threads that do not keep the process alive: work must leave nothing half done.
    """
    with begun_in_threads(work, items, count) as wait:
        return wait()


@contextlib.contextmanager
def begun_in_threads[T, R](
    work: Callable[[T], R], items: Sequence[T], count: int | None = None
) -> Generator[Callable[[], list[R]]]:
    """Begin `map_in_threads`, and yield the function that waits for it; the block's end leaves what has not begun."""
    left, done = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, R | None, BaseException | None]]()
    for number in range(len(items)):
        left.put(number)
    over = threading.Event()

    def take() -> None:
        while not over.is_set():
            try:
                number = left.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, work(items[number]), None))
            except BaseException as error:
                done.put((number, None, error))

    for _ in range(min(count or os.cpu_count() or 1, len(items))):
        begin_thread(take, "interruptible")
    found: dict[int, R | None] = {}

    def wait() -> list[R]:
        while len(found) < len(items):
            number, result, error = done.get()
            if error is not None:
                raise error
            found[number] = result
        return [found[number] for number in range(len(items))]  # pyright: ignore[reportReturnType]

    try:
        yield wait
    finally:
        over.set()
