"""The error of learner settings that cannot work."""

from typing import Any

from axlearn_like.config import ConfigBase, owner_name
from mesh.errors import UserError


class LearnerError(UserError, ValueError):
    """A setting of the learner that is invalid, or that does not fit the parameters."""


def check(cfg: ConfigBase[Any], field: str, fits: bool, expected: str) -> None:
    """Raise LearnerError, naming the field by its path in the config, unless `fits`."""
    if not fits:
        raise LearnerError(f"{where(cfg)}.{field}: expected {expected}, got {getattr(cfg, field)!r}")


def where(cfg: ConfigBase[Any]) -> str:
    """Return the path of a config in the tree that is being built, or else the name of what it builds."""
    return cfg._path or owner_name(cfg)  # pyright: ignore[reportPrivateUsage]
