"""Where in a config tree something could not be built."""

import contextlib
from collections.abc import Iterator
from typing import Any

from axlearn_like.config.base import BUILDING, ConfigBase
from axlearn_like.config.edit import root_name
from mesh.errors import UserError


@contextlib.contextmanager
def errors_at(field: str, cfg: ConfigBase[Any]) -> Iterator[None]:
    """A UserError of what is built inside tells the path of what could not be; that of `cfg` is `field`."""
    try:
        yield
    except UserError as error:
        notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(BUILDING))
        path, root = next(notes, "").removeprefix(BUILDING), root_name(cfg)
        if not path.startswith(root):
            raise
        raise UserError(f"{field}{path.removeprefix(root)}: {error}") from error
