"""A program that is compiled when it would first be used, beside another that has the same results."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class LateProgram:
    """A program for so many rows that is compiled in a thread as soon as it would be used; another serves till then."""

    def __init__(self, rows: int, compile_it: Callable[[], None]):
        self.rows, self._compile = rows, compile_it
        self._compiled: Future[None] | None = None

    def ready(self) -> bool:
        """Return True if it is compiled; its compilation has begun. Raises what the compiler raises."""
        if self._compiled is None:
            thread = ThreadPoolExecutor(1, "compile")
            self._compiled = thread.submit(self._compile)
            thread.shutdown(wait=False)
        if self._compiled.done():
            self._compiled.result()
            return True
        return False
