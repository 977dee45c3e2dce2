"""The base of what is held until `close`: files, locks, processes."""

import abc
from typing import Self


class Closing(abc.ABC):
    """A context manager that closes itself."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is held; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
