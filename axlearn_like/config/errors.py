"""The errors of configs, each with the path of the field that is at fault."""

import contextlib
from collections.abc import Generator

from mesh.errors import UserError


class ConfigError(UserError):
    """A config, an edit or a config's text that cannot be; the message names the field.

    Attributes:
        path: from the root of the config to the fault, as `set_path` takes it after the root's name; "" where the
            fault has no place in a config.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(_shortened(message))
        self.path = path


class FieldError(ConfigError, AttributeError):
    """A field that does not exist; an AttributeError as well, for `hasattr` and `getattr` ask for that."""


class ImportNameError(ConfigError):
    """The name of a class or function that cannot be imported, or that a config may not name."""


class AnnotationError(ConfigError):
    """A field's annotation names something that does not exist at run time."""


def _shortened(message: str) -> str:
    """Return a message without its middle if a value of a stranger's text makes it long."""
    left_out = len(message) - 1000
    return message if left_out <= 100 else f"{message[:700]} ... [{left_out:,} characters] ... {message[-300:]}"


def mark_path(error: BaseException, path: str) -> None:
    """Note on an error which config was being built; the innermost counts."""
    if marked_path(error) is None:
        error.__dict__["config_path"] = path
        error.add_note(f"while building {path}")


@contextlib.contextmanager
def marking(path: str) -> Generator[None]:
    """Note on an error of the block which config it is about, as `mark_path` does."""
    try:
        yield
    except Exception as error:
        mark_path(error, path)
        raise


def marked_path(error: BaseException) -> str | None:
    """The path that `mark_path` noted."""
    return error.__dict__.get("config_path")
