"""What can be wrong with weights on their way."""

from mesh import UserError


class WeightsError(UserError):
    """Weights that are damaged, of another shape, or of a version that is not to be had."""


class VersionGone(WeightsError):
    """The version is not held (any more) where it was asked for; another shard server may have it."""


class WrongBase(WeightsError):
    """A delta does not fit what it was to be added to; the whole has to be sent."""


class PublishAborted(WeightsError):
    """What was pushed so far is lost, because the server was restarted; the version has to be pushed from the start."""
