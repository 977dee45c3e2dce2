"""Errors of publishing, storing and pulling weights."""

from mesh import UserError


class WeightsError(UserError):
    """Weights that are damaged, of the wrong shape, or of a version that is not available."""


class VersionGone(WeightsError):
    """The version is not (or no longer) held where it was requested; another server may have it."""


class WrongBase(WeightsError):
    """A delta does not fit the base that it is added to; the full shard has to be sent."""


class PublishAborted(WeightsError):
    """The shards pushed so far are lost, because the server was restarted; publishing has to start over."""
