"""The type of the arguments and options that take a path."""

import os
from typing import Any, override

import click

from axlearn_like.run.object_store import local_path


class LocalPath(click.Path):
    """A path of this machine; a URL is refused before the command begins (UserError)."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as `click.Path` does."""
        local_path(os.fspath(value), param.opts[-1] if param else "path")
        return super().convert(value, param, ctx)
